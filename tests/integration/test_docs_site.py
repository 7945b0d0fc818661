"""The site of docs/ is built strictly: links, anchors, the navigation, the modules of the API."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPO


def build(folder: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """The site of the mkdocs.yml in `folder`."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=folder,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    out = tmp_path_factory.mktemp("site")
    done = build(REPO, out)
    assert done.returncode == 0, done.stdout
    return out


def test_every_page_is_built(site: Path) -> None:
    missing = [
        path
        for path in (REPO / "docs").rglob("*.md")
        if not (site / path.relative_to(REPO / "docs")).with_suffix(".html").is_file()
    ]
    assert missing == []


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    loaded = re.compile(
        r"<(?:script|img|iframe)[^>]*\ssrc=\"?(https?:)?//|<link[^>]*rel=\"?(?:stylesheet|preconnect)[^>]*href=\"?(?:https?:)?//"
    )
    assert [path for path in site.rglob("*.html") if loaded.search(path.read_text())] == []
