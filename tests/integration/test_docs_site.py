"""The site of docs/ is built strictly: links, anchors, the navigation, the modules of the API."""

import re
import sys
from pathlib import Path

from tests.support.jobs import run_to_end
from tests.support.paths import REPO

_LOADED = re.compile(
    r"<(?:script|img|iframe)[^>]*\ssrc=\"?(https?:)?//"
    r"|<link[^>]*rel=\"?(?:stylesheet|preconnect)[^>]*href=\"?(?:https?:)?//"
)


def test_site_has_every_page_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    mkdocs = sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path
    done = run_to_end(*mkdocs, cwd=REPO, NO_MKDOCS_2_WARNING=1)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = [path.relative_to(REPO / "docs") for path in (REPO / "docs").rglob("*.md")]
    assert [page for page in pages if not (tmp_path / page).with_suffix(".html").is_file()] == []
    assert [path for path in tmp_path.rglob("*.html") if _LOADED.search(path.read_text())] == []
