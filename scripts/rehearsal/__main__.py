"""Rehearse CUDA without a GPU; scripts/rehearse.sh starts it and prepares its environment.

    ./scripts/rehearse.sh                        all cases
    ./scripts/rehearse.sh --only qwen3           cases whose name has the word
    ./scripts/rehearse.sh --controls             planted mistakes: each must be found
    ./scripts/rehearse.sh --counts counts.json   what a layer of the shipped models costs
    ./scripts/rehearse.sh --list                 names of the cases

Exit code 1 and a line for each finding, 0 if there is none.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.rehearsal.cases import CONFIGS, Case, all_cases
from scripts.rehearsal.controls import CONTROLS, missed
from scripts.rehearsal.counts import count_layers, counted_cases, in_words
from scripts.rehearsal.rank import rehearse_all
from titan_moe.runtime.process_pool import in_fresh_processes

_CASES_PER_PROCESS = 12


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./scripts/rehearse.sh", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", default="", metavar="WORD", help="cases with this in their name")
    parser.add_argument("--list", action="store_true", help="name the cases")
    parser.add_argument("--controls", action="store_true", help="plant mistakes")
    parser.add_argument("--counts", type=Path, metavar="FILE", help="count layers, as JSON there")
    options = parser.parse_args(argv)
    cases = [case for case in all_cases() if options.only in case.name]
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    if options.controls:
        return _plant(options.only)
    if options.counts is not None:
        return _count(options.counts, options.only)
    started = time.perf_counter()
    num_findings = _rehearse(cases)
    print(f"{len(cases)} cases, {num_findings} findings, {time.perf_counter() - started:.0f} s")
    return 1 if num_findings else 0


def _plant(word: str) -> int:
    controls = [control for control in CONTROLS if word in control.name]
    lines = _run(missed, [(control.name,) for control in controls])
    for line in filter(None, lines):
        print(line)
    found = sum(not line for line in lines)
    print(f"{found} of {len(lines)} planted mistakes found")
    return 0 if found == len(lines) else 1


def _count(path: Path, word: str) -> int:
    cases = counted_cases(word)
    counted = {
        deep.path.relative_to(CONFIGS).as_posix(): found
        for (_, deep), found in zip(cases, _run(count_layers, cases), strict=True)
    }
    for name, found in counted.items():
        print(in_words(name, found))
    path.write_text(json.dumps(counted, indent=1) + "\n", encoding="utf-8")
    return 0


def _rehearse(cases: list[Case]) -> int:
    """Prints all findings; returns their number."""
    num_findings = num_done = 0
    for _, results in in_fresh_processes(rehearse_all, _tasks(cases), num_workers=1):
        for name, findings in results:
            for finding in findings:
                print(f"{finding} [{name}]", flush=True)
            num_findings += len(findings)
        num_done += len(results)
        print(f"{num_done} of {len(cases)} layouts", flush=True)
    return num_findings


def _run(function: Callable[..., Any], tasks: Sequence[tuple]) -> list[Any]:
    """Runs each task in a fresh process, one at a time; returns results in the tasks' order."""
    found = in_fresh_processes(function, tasks, num_workers=1)
    return [value for _, value in sorted(found, key=lambda item: item[0])]


def _tasks(cases: list[Case]) -> list[tuple[list[Case]]]:
    """Groups cases by process: those of one rank in worlds of one size share a process."""
    worlds: dict[tuple[int, int], list[Case]] = {}
    for case in cases:
        worlds.setdefault((case.world_size, case.rank), []).append(case)
    return [
        (alike[first : first + _CASES_PER_PROCESS],)
        for alike in worlds.values()
        for first in range(0, len(alike), _CASES_PER_PROCESS)
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
