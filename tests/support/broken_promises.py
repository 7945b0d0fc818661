"""Promises of the program, each with lines that break it and the tests that must fail then.

The list is kept in tests/broken_promises, a file for each subject. A planted bug (planting.py) is
one line of a function, changed inside the ranks of a run that a gate then judges. These are changed
in their file, because they may be several lines, stand outside any function or in a shell script,
and because commands and processes that a test starts must have them too.
"""

import shlex
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import REPO
from titan_moe.config.parse import tomllib

_FOLDER = REPO / "tests" / "broken_promises"


class Broken(NamedTuple):
    """A promise, and a plausible mistake that breaks it."""

    subject: str
    """The stem of the file that it stands in."""
    promise: str
    """The promise, in a sentence."""
    file: str
    """The file with the mistake, from the repository's root."""
    right: str
    """Stands in the file once."""
    wrong: str
    """The lines that replace it."""
    tests: str
    """Arguments of pytest, as in a shell: the tests that must see it. Those of the default tier
    run; `--tier slow` adds the slow ones."""
    waits: bool = False
    """The mistake is to wait without end, so a test that runs into its time limit has seen it."""

    @property
    def name(self) -> str:
        return f"{self.subject}: {self.promise}"

    def break_file(self, root: Path) -> str:
        """The file's text below a root with the mistake; AssertionError if the line is gone."""
        text = (root / self.file).read_text(encoding="utf-8")
        found = text.count(self.right)
        assert found == 1, f"{self.file} has {self.right!r} {found} times, not once"
        return text.replace(self.right, self.wrong)

    def test_arguments(self) -> list[str]:
        return shlex.split(self.tests)


def read_promises() -> list[Broken]:
    """Returns all promises, by subject."""
    return [
        Broken(subject=path.stem, **entry)
        for path in sorted(_FOLDER.glob("*.toml"))
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["broken"]
    ]
