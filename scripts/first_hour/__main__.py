"""Runs the parts of the first hour, and writes their page and their JSON after each of them.

scripts/first_hour.sh has the commands; parts.py has what each part asks.
"""

import argparse
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from scripts.bench.measure import describe
from scripts.first_hour.parts import Part, all_parts
from scripts.first_hour.session import REPO, Machine, PartError, Session, UnseenError
from titan_moe.runtime.files import write_whole
from titan_moe.runtime.launch import count_gpus
from titan_moe.runtime.revision import code_in_words, running_code
from titan_moe.verify.report.render import render

_CPU_RANKS = 4


@dataclass(frozen=True)
class Result:
    """The end of one part."""

    name: str
    question: str
    verdict: str
    """"passed", "failed", or "not seen": this machine cannot show it."""
    line: str
    seconds: float
    date: str
    code: str
    figures: dict[str, Any] = field(default_factory=dict)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    machine = _machine(options)
    chosen = [part for part in all_parts(machine) if options.only in part.name]
    if machine.nodes > 1:
        chosen = [part for part in chosen if part.many_nodes]
    if not chosen:
        names = ", ".join(part.name for part in all_parts(machine))
        print(f"error: --only {options.only}: choose from {names}", file=sys.stderr)
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for number, part in enumerate(chosen, 1):
        print(f"{number}/{len(chosen)} {part.name}: {part.question}", flush=True)
        folder = options.folder / part.name.replace(" ", "-").replace("/", "-")
        result = _passed_before(folder) or run_part(part, machine, folder)
        print(f"    {result.verdict} in {result.seconds:.0f} s: {result.line}", flush=True)
        results.append(result)
        if machine.node == 0:
            _write(options.folder, results, len(chosen), machine)
    failed = sum(result.verdict == "failed" for result in results)
    print(f"{failed} of {len(results)} parts failed; {options.folder / 'first_hour.html'}")
    return 1 if failed else 0


def run_part(part: Part, machine: Machine, folder: Path) -> Result:
    """Runs a part in an empty folder; whatever it raises is its result."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began, figures = time.monotonic(), {}
    try:
        seen = part.run(Session(machine, folder, part.limit_s))
        verdict, line, figures = "passed", seen.line, dict(seen.figures)
    except UnseenError as reason:
        verdict, line = "not seen", str(reason)
    except PartError as reason:
        verdict, line = "failed", str(reason)
    except Exception as error:  # A mistake of this script costs the other parts nothing.
        verdict, line = "failed", f"{type(error).__name__}: {error}"
        (folder / "traceback.txt").write_text(traceback.format_exc(), encoding="utf-8")
    result = Result(
        name=part.name,
        question=part.question,
        verdict=verdict,
        line=line,
        seconds=round(time.monotonic() - began, 1),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        code=_code(),
        figures=figures,
    )
    write_whole(folder / "result.json", json.dumps(asdict(result), indent=1))
    return result


def _passed_before(folder: Path) -> Result | None:
    """Returns an earlier result, if the part passed with the code that runs now."""
    file = folder / "result.json"
    if not file.is_file():
        return None
    result = Result(**json.loads(file.read_text(encoding="utf-8")))
    return result if result.verdict == "passed" and result.code == _code() else None


def _code() -> str:
    """Names the commit and a hash of the package's files."""
    return code_in_words({**running_code(), "folder": "titan_moe"})


def _write(folder: Path, results: Sequence[Result], of: int, machine: Machine) -> None:
    facts = {**describe(machine.device), **asdict(machine), "code": _code()}
    whole = {"machine": facts, "parts": [asdict(result) for result in results]}
    write_whole(folder / "first_hour.json", json.dumps(whole, indent=1))
    page = render("first_hour.html", title="The first hour", facts=facts, results=results, of=of)
    write_whole(folder / "first_hour.html", page)


def _machine(options: argparse.Namespace) -> Machine:
    gpus = count_gpus(os.environ) if torch.cuda.is_available() else 0
    device = options.device or ("cuda" if gpus else "cpu")
    if device == "cuda" and not gpus:
        sys.exit("error: no GPU here: --device cpu runs debug models on CPU processes")
    nodes = int(os.environ.get("NNODES", 1))
    local = gpus if device == "cuda" else _CPU_RANKS
    node, endpoint = int(os.environ.get("NODE_RANK", 0)), os.environ.get("RDZV_ENDPOINT", "")
    return Machine(device, local * nodes, nodes, node, endpoint)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="first_hour.sh", description="The first hour on GPUs.")
    default = REPO / "outputs" / "first_hour"
    parser.add_argument("folder", nargs="?", type=Path, default=default, help="%(default)s")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda where GPUs are")
    parser.add_argument("--only", default="", metavar="NAME", help="parts whose name has it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
