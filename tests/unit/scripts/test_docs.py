"""The generated parts of docs/ are up to date, and one that is not is named."""

import pytest

from scripts.docs.__main__ import filled, main


def test_generated_parts_of_pages_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, f"{capsys.readouterr().out}: run: python -m scripts.docs"


def test_a_region_is_written_anew_and_the_rest_of_the_page_kept() -> None:
    page = "# A\n\n<!-- generated: a -->\nold\n<!-- end -->\nwords\n"
    regions = {"a": lambda: "\nnew\n"}
    new = filled(page, regions)
    assert new == "# A\n\n<!-- generated: a -->\n\nnew\n\n<!-- end -->\nwords\n"
    assert filled(new, regions) == new
    assert filled(new, {"a": lambda: None}) == new
    with pytest.raises(KeyError, match="b"):
        filled("<!-- generated: b -->\n<!-- end -->\n", regions)
    with pytest.raises(ValueError, match="without an end"):
        filled("<!-- generated: a -->\nold\n", regions)
