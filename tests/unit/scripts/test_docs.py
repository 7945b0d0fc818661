"""The generated parts of docs/ are up to date, and one that is not is named."""

import re
from pathlib import Path

import pytest

from scripts.docs.__main__ import main
from scripts.docs.generated import filled, outdated
from tests.support.paths import REPO
from titan_moe.config.parse import known_keys


def test_the_generated_parts_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, f"{capsys.readouterr().out}: run: python -m scripts.docs"


def test_a_region_is_written_anew_and_the_rest_of_the_page_kept() -> None:
    page = "# A\n\n<!-- generated: a -->\nold\n<!-- end -->\nwords\n"
    regions = {"a": lambda: "\nnew\n"}
    new = filled(page, regions, {})
    assert new == "# A\n\n<!-- generated: a -->\n\nnew\n\n<!-- end -->\nwords\n"
    assert filled(new, regions, {}) == new
    with pytest.raises(KeyError, match="b"):
        filled("<!-- generated: b -->\n<!-- end -->\n", regions, {})
    with pytest.raises(ValueError, match="without an end"):
        filled("<!-- generated: a -->\nold\n", regions, {})


def test_a_page_that_is_out_of_date_is_found(tmp_path: Path) -> None:
    text = (REPO / "docs" / "configuration.md").read_text()
    (tmp_path / "as_it_is.md").write_text(text)
    (tmp_path / "changed.md").write_text(text.replace("Free text, logged at start.", "Text."))
    pages = {path: new for path, new in outdated(tmp_path).items() if path.suffix == ".md"}
    assert pages == {tmp_path / "changed.md": text}


def test_every_key_has_an_anchor() -> None:
    text = (REPO / "docs" / "configuration.md").read_text()
    anchors = {anchor.rstrip("}") for anchor in re.findall(r"\{#(\S+)", text)}
    assert set(known_keys()) - anchors == set()
