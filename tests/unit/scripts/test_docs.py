"""The generated parts of docs/ are up to date, and one that is not is named."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts.docs.__main__ import main
from scripts.docs.figures.step import WALK
from scripts.docs.figures.svg import Drawing
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
    assert [key for key in known_keys() if f"{{ #{key} " not in text] == []


def test_the_walk_through_a_step_names_files_that_exist() -> None:
    assert [file for _, file, _ in WALK if not (REPO / file).is_file()] == []


def test_a_drawing_is_a_file_of_its_own_with_both_schemes() -> None:
    drawing = Drawing(100, 50, 'a "drawing"')
    drawing.text(1, 2, "a < b", color="one")
    drawing.line([(0, 0), (10.04, 5)], color="two", arrow=True)
    text = drawing.render()
    assert text == drawing.render()
    root = ElementTree.fromstring(text)
    assert root.attrib["aria-label"] == 'a "drawing"' and "a < b" in list(root.itertext())
    assert "prefers-color-scheme:dark" in text and 'id="two"' in text and 'id="one"' not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
