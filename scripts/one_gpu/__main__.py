"""Runs the stages of a call on one GPU until time is up; scripts/one_gpu.sh has the commands."""

import argparse
import json
import os
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from scripts.bench.measure import usable_gpus
from scripts.first_hour.parts import Part
from scripts.first_hour.runner import Result, code_of, in_words, run_part
from scripts.first_hour.session import REPO, Machine
from scripts.one_gpu.stages import all_stages
from titan_moe.runtime.files import replacing, write_whole
from titan_moe.runtime.revision import code_revision

_RESERVE_S = 15
"""Seconds that are kept for the end of a stage that is stopped, and for the archive."""
_LEAST_SHARE = 1 / 3
"""A stage is not started with less than this share of its limit."""
_KEPT = (".json", ".jsonl", ".txt", ".xml")
_MOST_BYTES = 1 << 20
"""A file of the archive is at most so large: little comes back from such machines."""


def main(argv: Sequence[str] | None = None) -> int:
    ends = time.monotonic()
    options = _parser().parse_args(argv)
    ends += options.seconds - _RESERVE_S
    if options.device == "cuda" and not usable_gpus():
        sys.exit("error: no GPU here: --device cpu runs toy sizes")
    commit = options.commit or (code_revision(REPO) or {}).get("commit")
    stages = _chosen(options.only)
    if commit is None or not stages:
        names = ", ".join(stage.name for stage in all_stages())
        missing = f"--only {options.only}: choose from {names}"
        print(f"error: {missing if commit else 'no git here: --commit ID'}", file=sys.stderr)
        return 2
    machine, out = Machine(options.device, ranks=1), options.out.resolve()
    if out.exists() and not out.is_dir():
        sys.exit(f"error: {out} is a file: name a folder")
    out.mkdir(parents=True, exist_ok=True)
    results = [_unseen(stage, machine, "not started") for stage in stages]
    with tempfile.TemporaryDirectory(prefix="one-gpu-") as work:
        try:
            for number, stage in enumerate(stages):
                print(f"{number + 1}/{len(stages)} {stage.name}: {stage.question}", flush=True)
                limit_s = min(stage.limit_s, left_s := ends - time.monotonic())
                if limit_s < _LEAST_SHARE * stage.limit_s:
                    line = f"not started: {left_s:.0f} s were left of {options.seconds}"
                    results[number] = _unseen(stage, machine, line)
                else:
                    line = "was running when the call ended: see log.txt"
                    results[number] = _unseen(stage, machine, line)
                    _write(out, Path(work), str(commit), results, machine)
                    folder = Path(work) / stage.name.replace(" ", "-")
                    results[number] = run_part(stage, machine, folder, limit_s, out / "log.txt")
                _write(out, Path(work), str(commit), results, machine)
                print(f"    {results[number].verdict}: {results[number].line}", flush=True)
        except KeyboardInterrupt:
            _write(out, Path(work), str(commit), results, machine)
            return 130
    print(f"{in_words(results, len(results))}; {out / 'one_gpu.json'}")
    return 1 if any(result.verdict == "failed" for result in results) else 0


def _chosen(only: str) -> list[Part]:
    """Returns the stages whose name has one of the words, in the words' order, after the first
    stage, which says what device it is; all stages without words."""
    first, *others = all_stages()
    words = only.split(",")
    if unknown := [word for word in words if not any(word in each.name for each in others)]:
        print(f"no stage has {unknown[0]} in its name", file=sys.stderr)
        return []
    found = {each.name: each for word in words for each in others if word in each.name}
    return [first, *found.values()]


def _unseen(stage: Part, machine: Machine, line: str) -> Result:
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Result(stage.name, stage.question, "not seen", line, 0.0, date, code_of(machine))


def _write(out: Path, work: Path, commit: str, results: Sequence[Result], machine: Machine) -> None:
    """Writes the JSON and the archive anew, each whole or not at all."""
    whole = {
        "commit": commit,
        "code": code_of(machine),
        "sum": in_words(results, len(results)),
        "stages": [asdict(result) for result in results],
    }
    write_whole(out / "one_gpu.json", json.dumps(whole, indent=1, default=str))
    with replacing(out / "files.tar.gz") as aside, tarfile.open(aside, "w:gz") as archive:
        for file in sorted(work.rglob("*")):
            if file.suffix in _KEPT and file.stat().st_size <= _MOST_BYTES:
                archive.add(file, file.relative_to(work))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="one_gpu.sh", description="One call on one GPU.")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the results")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=int, default=570, help="default: %(default)s")
    parser.add_argument("--only", default="", metavar="NAME,NAME", help="stages whose name has it")
    parser.add_argument("--commit", default=os.environ.get("COMMIT"), help="default: git's")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
