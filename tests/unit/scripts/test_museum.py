"""Each mistake in the museum has a source, applies to this code, and stands in the page."""

import re

import pytest

from scripts.museum.page import FIGURES
from tests.support.exhibits import HALLS, exhibits
from tests.support.paths import REPO
from tests.support.planting import right_source

EXHIBITS = exhibits()
PAGE = (REPO / "docs/museum.md").read_text(encoding="utf-8")


def test_museum_has_sixteen_mistakes_in_all_halls() -> None:
    assert len(EXHIBITS) == 16
    assert {bug.hall for bug in EXHIBITS.values()} == set(HALLS)


@pytest.mark.parametrize("name", EXHIBITS)
def test_exhibit_names_its_threads_and_applies_to_this_code(name: str) -> None:
    bug = EXHIBITS[name]
    _, source = right_source(bug)
    compile(source.replace(bug.right, bug.wrong), name, "exec")
    assert bug.story and all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", each) for each in bug.museum)


@pytest.mark.parametrize("name", EXHIBITS)
def test_page_shows_exhibit_with_its_threads(name: str) -> None:
    bug = EXHIBITS[name]
    assert f"**{name}**" in PAGE and FIGURES[bug.hall] in PAGE
    assert all(f"[{thread}](https://github.com/" in PAGE for thread in bug.museum)
