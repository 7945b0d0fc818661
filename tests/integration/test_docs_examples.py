"""Every block of the documentation that is marked as an example runs as it is printed."""

from pathlib import Path

import pytest

from tests.support.examples import Group, examples_of, read_examples, run_group
from tests.support.markdown import pages
from tests.support.paths import REPO

_READ = list(examples_of(REPO, pages()))
_GROUPS = [group for groups, _ in _READ for group in groups]


def test_every_marker_is_right() -> None:
    assert [problem for _, problems in _READ for problem in problems] == []


@pytest.mark.parametrize(
    "group",
    [
        pytest.param(group, id=group.name, marks=[pytest.mark.slow] if group.is_slow else [])
        for group in _GROUPS
    ],
)
def test_an_example_runs(group: Group, tmp_path: Path) -> None:
    run_group(group, tmp_path)


_PAGE = """
<!-- file: one configs/mine.toml -->
```toml
a = 1
```
Some words.
<!-- run: one -->
```bash
cat configs/mine.toml > said.txt
test -x run_train.sh
titan-moe --help > help.txt
git rev-parse main
```

- In a list:

    <!-- run: one -->
    ```bash
    grep 'a = 1' said.txt
    grep 'verify losses' help.txt
    ```
"""


def test_the_blocks_of_a_name_share_a_folder_that_looks_like_the_repository(tmp_path: Path) -> None:
    (group,), problems = read_examples("a.md", _PAGE)
    assert not problems and not group.is_slow
    assert [(each.line, each.kind) for each in group.examples] == [
        (3, "file"),
        (8, "run"),
        (18, "run"),
    ]
    run_group(group, tmp_path)


def test_a_block_that_fails_is_told_with_its_page_line_command_and_output(tmp_path: Path) -> None:
    text = "<!-- run: bad slow -->\n```bash\necho before\nfalse | cat\necho after\n```\n"
    (group,), _ = read_examples("docs/a.md", text)
    assert group.is_slow and group.name == "docs/a.md:bad"
    with pytest.raises(AssertionError) as caught:
        run_group(group, tmp_path)
    lines = str(caught.value).splitlines()
    assert lines[0] == "docs/a.md:2: exit code 1 of"
    assert "false | cat" in lines and lines[-1] == "before"
