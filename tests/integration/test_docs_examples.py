"""Every block of the documentation that is marked as an example runs as it is printed."""

from pathlib import Path

import pytest

from tests.support import examples
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


def test_a_block_that_takes_too_long_is_told_so_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examples, "TIMEOUT_S", 2.0)
    text = "<!-- run: long -->\n```bash\necho before\nexec sleep 60\n```\n"
    (group,), _ = read_examples("docs/a.md", text)
    with pytest.raises(AssertionError) as caught:
        run_group(group, tmp_path)
    lines = str(caught.value).splitlines()
    assert lines[0] == "docs/a.md:2: not done after 2 s:" and lines[-1] == "before"


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("[training]\nsteps = 7\n[parallelism]\ntensor_parallel_degree = 4", None),
        ("[training]\nstpes = 7", "training.steps"),
        ("[model]\nflavor = 'no such'", "no such"),
        ("[training]\ndataset = 'text'\ndataset_path = 'mine.txt'", "mine.txt"),
    ],
)
def test_a_fragment_is_checked_on_top_of_the_default_run(
    tmp_path: Path, toml: str, says: str | None
) -> None:
    (group,), problems = read_examples("a.md", f"<!-- check: it -->\n```toml\n{toml}\n```\n")
    assert not problems
    if says is None:
        return run_group(group, tmp_path)
    with pytest.raises(
        AssertionError, match=rf"^a.md:2: refused on any number of ranks:\n.*{says}"
    ):
        run_group(group, tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<!-- rnu: a -->\n```bash\nx\n```", "unknown marker 'rnu'"),
        ("<!-- run a -->\n```bash\nx\n```", "a marker is written 'KIND: NAME', not 'run a'"),
        ("<!-- run: a -->\n\n```bash\nx\n```", "no fenced block follows 'run: a'"),
        ("<!-- run: a -->\nwords", "no fenced block follows"),
        ("<!-- run: -->\n```bash\nx\n```", "a marker is 'run: NAME' or 'run: NAME slow'"),
        ("<!-- run: a fast -->\n```bash\nx\n```", "a marker is 'run: NAME' or 'run: NAME slow'"),
        ("<!-- run: a -->\n```toml\nx\n```", "run marks a bash block, not 'toml'"),
        ("<!-- check: a -->\n```bash\nx\n```", "check marks a toml block, not 'bash'"),
        ("<!-- check: a slow -->\n```toml\nx=1\n```", "a marker is 'check: NAME'"),
        ("<!-- file: a -->\n```toml\nx\n```", "a file's marker is"),
        ("<!-- file: a ../b -->\n```toml\nx\n```", "a file's marker is"),
        ("<!-- file: a b.toml -->\n```toml\nx\n```", "a has files, and nothing that runs"),
    ],
)
def test_a_mistake_in_a_marker_is_found(text: str, problem: str) -> None:
    _, (found,) = read_examples("a.md", text)
    assert found.startswith("a.md:") and problem in found


def test_other_comments_and_blocks_mean_nothing() -> None:
    text = (
        "<!-- generated: models -->\nwords\n<!-- end -->\n<!-- a remark -->\n"
        "\n```bash\n# <!-- run: a -->\n```\n```text\n```\n"
    )
    assert read_examples("a.md", text) == ([], [])
