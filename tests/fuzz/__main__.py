"""Broken configurations, damaged folders, kills and lost disks by the hundred: what comes of each?

    python -m tests.fuzz --out campaign.jsonl
    python -m tests.fuzz --only 'toml|tokens' --count 20 --seed 7

A trial is named by subject, seed and number, and draws from these alone: the same one can be made
again with --only and --first. Killed, the same command goes on behind the last line of --out.

A trial of a configuration or a folder may read what it was given (checkpoints and exports: only as
if nothing had been damaged), or refuse it in lines that a user can use. All else is a failure: a
traceback or the name of a Python exception, a hang, more than 2 GiB of memory, a changed folder, a
program in the data that was run.

In a trial of "kills", processes of a run get SIGKILL: ranks, launchers. In
those of "full", "read_only" and "removed" it is the run's file system that fails, a real one, which
takes root. All processes must end, no incomplete checkpoint may count as one, a run that fails must
say so in lines that a user can use, and the same command must then make the undisturbed run of it:
every figure of every step, and every byte of the last checkpoint. "missed" are trials whose run had
ended before anything befell it.

On a busy machine --seconds gives trials, and each run of those with several, more time.

Exit codes: 0; 1 a trial failed; 130 interrupted.
"""

import argparse
import json
import os
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tqdm import tqdm

# Before `datasets` is imported, which remembers what it has read by name and size.
_WORK = tempfile.TemporaryDirectory(prefix="campaign-")
os.environ["HF_HOME"] = str(Path(_WORK.name) / "hf")

import titan_moe.trainer  # noqa: E402, F401  Imported once, not in every trial.
from tests.fuzz import toml_files  # noqa: E402
from tests.fuzz.apart import Outcome, run_apart  # noqa: E402
from tests.fuzz.disks import TROUBLES, Disks, can_mount  # noqa: E402
from tests.fuzz.folders import SUBJECTS, Folders  # noqa: E402
from tests.fuzz.kills import Kills  # noqa: E402
from tests.fuzz.runs import Undisturbed  # noqa: E402

_TOML, _KILLS = "toml", "kills"
_COUNTS = {
    _TOML: 1000,
    **dict.fromkeys(SUBJECTS, 300 // len(SUBJECTS) + 1),
    _KILLS: 200,
    **dict.fromkeys(TROUBLES, 20),
}
_KINDS = ("read", "refused", "resumed", "missed", "failed")
Trial = Callable[[random.Random], tuple[str, Outcome]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="REGEX", default="", help="subjects")
    parser.add_argument("--count", type=int, help="trials of each subject")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--seconds", type=float, default=60, help="of a trial or run; default: 60")
    parser.add_argument("--out", type=Path, metavar="FILE", help="a JSON line for every trial")
    arguments = parser.parse_args()
    subjects = [name for name in _COUNTS if re.search(arguments.only, name)]
    if not subjects:
        parser.error(f"--only {arguments.only!r} matches none of {', '.join(_COUNTS)}")
    if not can_mount() and (without := [name for name in subjects if name in TROUBLES]):
        print(f"without {', '.join(without)}: mounting a file system takes root", file=sys.stderr)
        subjects = [name for name in subjects if name not in without]
    done = {line["trial"]: line["kind"] for line in _lines(arguments.out)}
    trials = _trials(Path(_WORK.name), arguments.seconds)
    wanted = [
        (name, f"{name} {arguments.seed} {number}")
        for name in subjects
        for number in range(arguments.first, arguments.first + (arguments.count or _COUNTS[name]))
    ]
    tally = Counter((name, done[trial]) for name, trial in wanted if trial in done)
    try:
        for name, trial in tqdm([each for each in wanted if each[1] not in done], unit="trial"):
            what, outcome = trials[name](random.Random(trial))
            tally[name, outcome.kind] += 1
            if outcome.kind == "failed":
                tqdm.write(f"{trial}: {what}\n  {outcome.said}")
            if arguments.out:
                _append(arguments.out, {"trial": trial, "what": what, **outcome._asdict()})
    except KeyboardInterrupt:
        print("interrupted: the same command goes on", file=sys.stderr)
        return 130
    for name in subjects:
        kinds = [kind for kind in _KINDS if tally[name, kind] or kind == "failed"]
        print(f"{name}: {', '.join(f'{tally[name, kind]} {kind}' for kind in kinds)}")
    return int(any(tally[name, "failed"] for name in subjects))


def _trials(work: Path, seconds: float) -> dict[str, Trial]:
    """`seconds`: of a trial, or of each run of one that has several."""
    folders, undisturbed = Folders(work, seconds), Undisturbed(work / "undisturbed", seconds)
    disks = Disks(undisturbed, seconds)

    def configuration(random_: random.Random) -> tuple[str, Outcome]:
        content, what = toml_files.broken(random_)
        return what, run_apart(toml_files.trial(content), seconds=seconds)

    return {
        _TOML: configuration,
        **{name: partial(folders.trial, name) for name in SUBJECTS},
        _KILLS: Kills(undisturbed, seconds).trial,
        **{name: partial(disks.trial, name) for name in TROUBLES},
    }


def _lines(path: Path | None) -> Iterator[dict[str, str]]:
    if path is not None and path.exists():
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def _append(path: Path, line: dict[str, str]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
