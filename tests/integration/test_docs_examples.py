"""Every block of the documentation that is marked as an example runs as it is printed.

CONTRIBUTING.md says how a block is marked. The examples of one name on one page share a folder.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import tomli_w

from tests.support.commands import run_command
from tests.support.markdown import fences, pages, without_fences
from tests.support.paths import DEBUG_CONFIGS, REPO, copy_checkout
from tests.support.processes import git
from titan_moe.config.parse import tomllib
from titan_moe.runtime.process_pool import TIMEOUT_S

_MARKER = re.compile(r"(run|file|check): (\S+) ?(\S*)$")
_TRIED_RANKS = (1, 2, 4, 8, 16, 32, 64)


class Example(NamedTuple):
    """A marked block of a page."""

    place: str
    """The page and the line."""
    kind: str
    name: str
    option: str
    """"slow" of a run, the path of a file."""
    text: str


def read_examples(page: str, text: str) -> dict[str, list[Example]]:
    """The examples of a page, by page and name."""
    groups: dict[str, list[Example]] = {}
    for fence in fences(text):
        if marker := _MARKER.match(fence.comment or ""):
            example = Example(f"{page}:{fence.line}", *marker.groups(), fence.text)
            groups.setdefault(f"{page}:{example.name}", []).append(example)
    return groups


def run_group(group: list[Example], folder: Path) -> None:
    """Writes the files and runs the blocks, in order; AssertionError names the block that fails.

    The working folder is a repository with one commit on `main`: a copy of this one's files.
    """
    checkout = folder / "titan_moe"
    checkout.mkdir()
    if any(example.kind == "run" for example in group):
        copy_checkout(checkout)
        for words in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
            git(checkout, *words)
    environment = _environment(folder, checkout)
    for example in group:
        if example.kind == "file":
            path = checkout / example.option
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(example.text, encoding="utf-8")
        elif example.kind == "check":
            check_toml(example, checkout)
        else:
            _run_bash(example, checkout, environment)


def _run_bash(example: Example, folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", example.text],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode:  # No assert: pytest would indent the lines.
        code = f"exit code {done.returncode}"
        raise AssertionError(f"{example.place}: {code} of\n{example.text}\n{done.stdout[-6000:]}")


def check_toml(example: Example, folder: Path) -> None:
    """`titan-moe check` accepts the block, on top of the default run's file, for some number of
    ranks."""
    values = tomllib.loads((DEBUG_CONFIGS / "default.toml").read_text(encoding="utf-8"))
    for table, keys in tomllib.loads(example.text).items():
        values[table] = values.get(table, {}) | keys if isinstance(keys, dict) else keys
    path = folder / f"{example.name}.toml"
    path.write_text(tomli_w.dumps(values), encoding="utf-8")
    outputs = []
    for ranks in _TRIED_RANKS:
        done = run_command("check", "--config", path, "--ranks", ranks)
        if done.returncode == 0:
            return
        outputs.append(done.stderr)
    raise AssertionError(f"{example.place}: refused on any number of ranks:\n{outputs[0]}")


def _environment(folder: Path, checkout: Path) -> dict[str, str]:
    """A user's whose active environment is this one, on the CPU; `titan-moe` is on the PATH."""
    command = folder / "bin" / "titan-moe"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m titan_moe "$@"\n')
    command.chmod(0o755)
    left_out = ("CONFIG_FILE", "NGPU", "TITAN_MOE_CHECKOUT")
    mine = {name: value for name, value in os.environ.items() if name not in left_out}
    return mine | {
        "PATH": f"{command.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(checkout),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }


_TEXTS = {path.relative_to(REPO).as_posix(): path.read_text(encoding="utf-8") for path in pages()}
_GROUPS = {name: group for page in _TEXTS.items() for name, group in read_examples(*page).items()}


@pytest.mark.parametrize("page", _TEXTS)
def test_every_example_marker_is_followed_by_a_block(page: str) -> None:
    comments = re.findall(r"^ *<!-- (.*)", without_fences(_TEXTS[page]), re.MULTILINE)
    markers = [words for words in comments if not words.startswith(("generated: ", "end -->"))]
    assert len(markers) == sum(map(len, read_examples(page, _TEXTS[page]).values())), markers


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * any(each.option == "slow" for each in group))
        for name, group in _GROUPS.items()
    ],
)
def test_example_runs_as_shown(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_group(_GROUPS[name], tmp_path)


_PAGE = """
<!-- file: one configs/mine.toml -->
```toml
a = 1
```
<!-- run: one -->
```bash
cat configs/mine.toml > said.txt
titan-moe --help > help.txt
```

- In a list:

    <!-- run: one -->
    ```bash
    grep 'a = 1' said.txt && grep 'verify losses' help.txt && git rev-parse --abbrev-ref main
    false | cat
    echo after
    ```
"""


def test_example_has_one_folder_and_names_a_failing_block(tmp_path: Path) -> None:
    ((name, group),) = read_examples("a.md", _PAGE).items()
    with pytest.raises(AssertionError) as caught:
        run_group(group, tmp_path)
    lines = str(caught.value).splitlines()
    assert name == "a.md:one" and lines[0] == "a.md:15: exit code 1 of"
    assert "false | cat" in lines and "a = 1" in lines and lines[-1] == "main"
