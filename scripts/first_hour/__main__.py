"""Runs the parts of the first hour, and writes their page and their JSON after each of them.

scripts/first_hour.sh has the commands; parts.py has what each part asks.
"""

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from scripts.bench.measure import describe, usable_gpus
from scripts.first_hour.parts import all_parts
from scripts.first_hour.runner import Result, code_of, in_words, run_part
from scripts.first_hour.session import REPO, Machine
from titan_moe.runtime.files import write_whole
from titan_moe.verify.report.render import render

_CPU_RANKS = 4
_CPU_PATIENCE = 3
"""Limits are for GPUs; CPU ranks share cores with whatever else runs."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
        machine = _machine(options)
    except (FileExistsError, NotADirectoryError):
        return _refuse(f"{options.folder} is a file, or below one: name a folder")
    except ValueError as error:
        return _refuse(str(error))
    parts = {
        options.folder / part.name.replace(" ", "-").replace("/", "-"): part
        for part in all_parts(machine)
        if machine.nodes == 1 or part.many_nodes
    }
    chosen = {folder: part for folder, part in parts.items() if options.only in part.name}
    if not chosen:
        names = ", ".join(part.name for part in parts.values())
        return _refuse(f"--only {options.only}: choose from {names}")
    results = []
    for number, (folder, part) in enumerate(chosen.items(), 1):
        print(f"{number}/{len(chosen)} {part.name}: {part.question}", flush=True)
        result = _known(folder, machine)
        if result is None or result.verdict != "passed":
            limit_s = part.limit_s * (1 if machine.on_gpus else _CPU_PATIENCE)
            result = run_part(part, machine, folder, limit_s)
        print(f"    {result.verdict} in {result.seconds:.0f} s: {result.line}", flush=True)
        results.append(result)
        if machine.node == 0:
            write_whole(folder / "result.json", json.dumps(asdict(result), indent=1))
            _write(options.folder, list(parts), machine)
    print(f"{in_words(results, len(chosen))}; {options.folder / 'first_hour.html'}")
    return 1 if any(result.verdict == "failed" for result in results) else 0


def _refuse(line: str) -> int:
    print(f"error: {line}", file=sys.stderr)
    return 2


def _known(folder: Path, machine: Machine) -> Result | None:
    """Returns a part's last result, on the first node, by this code and on as many ranks."""
    file = folder / "result.json"
    if not file.is_file():
        return None
    result = Result(**json.loads(file.read_text(encoding="utf-8")))
    return result if result.code == code_of(machine) else None


def _write(folder: Path, parts: Sequence[Path], machine: Machine) -> None:
    """Writes the page and the JSON of the parts whose results are known.

    Args:
        parts: the folders of all parts.
    """
    results = [result for part in parts if (result := _known(part, machine)) is not None]
    facts = {**describe(machine.device), **asdict(machine), "code": code_of(machine)}
    whole = {"machine": facts, "parts": [asdict(result) for result in results]}
    write_whole(folder / "first_hour.json", json.dumps(whole, indent=1))
    values = {"facts": facts, "results": results, "sum": in_words(results, len(parts))}
    page = render("first_hour.html", title="The first hour", **values)
    write_whole(folder / "first_hour.html", page)


def _machine(options: argparse.Namespace) -> Machine:
    gpus = 0 if options.device == "cpu" else usable_gpus()
    device = options.device or ("cuda" if gpus else "cpu")
    if device == "cuda" and not gpus:
        sys.exit("error: no GPU here: --device cpu runs debug models on CPU processes")
    nodes, node = _variable("NNODES", 1), _variable("NODE_RANK", 0)
    endpoint = os.environ.get("RDZV_ENDPOINT", "")
    if not 0 <= node < nodes:
        raise ValueError(f"NODE_RANK={node} must be below NNODES={nodes}")
    if nodes > 1 and not re.fullmatch(r".+:\d{1,5}", endpoint):
        raise ValueError(f"NNODES={nodes} needs RDZV_ENDPOINT=HOST:PORT, not {endpoint!r}")
    local = gpus if device == "cuda" else _CPU_RANKS
    return Machine(device, local * nodes, nodes, node, endpoint)


def _variable(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or len(text) > 6:
        raise ValueError(f"{name}={text} must be a whole number")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="first_hour.sh", description="The first hour on GPUs.")
    default = REPO / "outputs" / "first_hour"
    parser.add_argument("folder", nargs="?", type=Path, default=default, help="%(default)s")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda where GPUs are")
    parser.add_argument("--only", default="", metavar="NAME", help="parts whose name has it")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on", file=sys.stderr)
        sys.exit(130)
