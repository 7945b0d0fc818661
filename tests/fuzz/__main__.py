"""Damaged folders, kills and lost disks: starts real runs, and judges what comes of each.

    python -m tests.fuzz --out campaign.jsonl
    python -m tests.fuzz --only 'kills|tokens' --count 20 --seed 7

A trial is named by subject, seed and number, and draws from these alone: the same one can be made
again with --only and --first.

A run that reads a damaged folder may go on (checkpoints and exports: only as if nothing had been
damaged), or refuse it in lines that a user can use. All else is a failure: a traceback or the name
of a Python exception, a hang, a changed folder, a program in the data that was run.

In a trial of "kills", processes of a run get SIGKILL: ranks, launchers. In those of "full",
"read_only" and "removed" it is the run's file system that fails, a real one, which takes root. All
processes must end, no incomplete checkpoint may count as one, a run that fails must say so in lines
that a user can use, and the same command must then make the undisturbed run of it: every figure of
every step, and every byte of the last checkpoint. "missed" are trials whose run had ended before
anything befell it.

On a busy machine --seconds gives each run more time.

Exit codes: 0; 1 a trial failed; 130 interrupted.
"""

import argparse
import json
import random
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from tests.fuzz import disturbances, folders
from tests.fuzz.disturbances import DISTURBANCES, can_mount
from tests.fuzz.folders import SUBJECTS
from tests.support.jobs import end_all

_COUNTS = {**dict.fromkeys(SUBJECTS, 40), **dict.fromkeys(DISTURBANCES, 10), "kills": 100}
_KINDS = ("read", "refused", "resumed", "missed", "failed")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="REGEX", default="", help="subjects")
    parser.add_argument("--count", type=int, help="trials of each subject")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--seconds", type=float, default=60, help="of a run; default: 60")
    parser.add_argument("--out", type=Path, metavar="FILE", help="a JSON line for every trial")
    arguments = parser.parse_args()
    subjects = [name for name in _COUNTS if re.search(arguments.only, name)]
    if not subjects:
        parser.error(f"--only {arguments.only!r} matches none of {', '.join(_COUNTS)}")
    without = [name for name in subjects if DISTURBANCES.get(name, DISTURBANCES["kills"]).mend]
    if without and not can_mount():
        print(f"without {', '.join(without)}: mounting a file system takes root", file=sys.stderr)
        subjects = [name for name in subjects if name not in without]
    wanted = [
        (name, f"{name} {arguments.seed} {number}")
        for name in subjects
        for number in range(arguments.first, arguments.first + (arguments.count or _COUNTS[name]))
    ]
    tally = Counter[tuple[str, str]]()
    with tempfile.TemporaryDirectory(prefix="campaign-") as work:
        try:
            for name, trial in tqdm(wanted, unit="trial"):
                make = folders.trial if name in SUBJECTS else disturbances.trial
                with tempfile.TemporaryDirectory(dir=work) as own:
                    what, outcome = make(
                        Path(work), arguments.seconds, name, Path(own), random.Random(trial)
                    )
                    end_all()
                tally[name, outcome.kind] += 1
                if outcome.kind == "failed":
                    tqdm.write(f"{trial}: {what}\n  {outcome.said}")
                if arguments.out:
                    line = {"trial": trial, "what": what, **outcome._asdict()}
                    with arguments.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        finally:
            end_all()
    for name in subjects:
        kinds = [kind for kind in _KINDS if tally[name, kind] or kind == "failed"]
        print(f"{name}: {', '.join(f'{tally[name, kind]} {kind}' for kind in kinds)}")
    return int(any(tally[name, "failed"] for name in subjects))


if __name__ == "__main__":
    sys.exit(main())
