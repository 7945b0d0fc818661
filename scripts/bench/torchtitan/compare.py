"""Measures titan_moe beside torchtitan 0.2.2, in turn, on the CPU.

    python -m scripts.bench.torchtitan.compare --rows 'cmp.*1 rank' --repeats 1
    python -m scripts.bench.torchtitan.compare --repeats 2 --steps 12 --json figures.json

The first run makes an environment for torchtitan from the package registry (--venv) and writes the
data set and the tokenizer that both programs get. torchtitan trains on CPUs with the substitutes of
torchtitan_rank.py. 1 thread per rank, no recomputation, 8 rows of 256 tokens a step, plain causal
attention.

Both programs read the same documents through the same tokenizer. titan_moe shuffles, torchtitan
takes documents as they come. Weights are each program's own draw; the first losses, near
ln(2048) = 7.6, are printed.

Each round runs both programs of a row once, in alternating order. A row whose job fails is not in
that round, and the exit code is 1. Tokens/s are medians of all steps from the 6th on; their ratio
is taken in each round. Memory is the peak of the largest rank's resident set beyond a process with
torch alone; growth is from the 6th to the last step.

Goals: 1.15 times torchtitan's tokens/s, 1.5 times in bfloat16; 0.7 of its memory, unless more is
needed; at most 2 % of growth. Needed are parameters, gradients and two moments in float32,
sharded, and the largest layer gathered in the row's type.
"""

import argparse
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from scripts.bench.measure import (
    REPO,
    Goal,
    JobFailed,
    describe,
    options,
    print_facts,
    print_table,
    spread,
    write_json,
)
from scripts.bench.torchtitan.jobs import (
    BYTES,
    LEFT_OUT,
    PROGRAMS,
    TORCHTITAN,
    Jobs,
    Model,
    Row,
    all_rows,
)
from titan_moe.models.stats import part_sizes, total
from titan_moe.runtime.revision import running_code

_FASTER = {"float32": 1.15, "bfloat16": 1.5}
_MEMORY, _GROWTH = 0.7, 0.02


def main() -> int:
    arguments = _arguments()
    rows = [row for row in all_rows() if re.search(arguments.rows, row.name)]
    jobs = Jobs(arguments.out, arguments.venv)
    jobs.prepare()
    bare_mib = memory_of_torch()
    code = 0
    with tqdm(total=arguments.repeats * len(rows), unit="row") as progress:
        for number in range(arguments.repeats):
            for row in rows:
                progress.set_description(row.name)
                order = PROGRAMS if number % 2 == 0 else PROGRAMS[::-1]
                try:
                    run_round(row, order, jobs, arguments.steps)
                except JobFailed as failure:
                    code = 1
                    print(f"{failure}\n{row.name}: not in round {number + 1}", file=sys.stderr)
                write(arguments.json, rows, bare_mib)
                progress.update()
    print_facts({"": TORCHTITAN, **describe(), "threads per rank": 1})
    print_tables([row for row in rows if row.runs], bare_mib)
    return code


def _arguments() -> argparse.Namespace:
    parser = options(__doc__, repeats=3)
    parser.add_argument("--steps", type=int, default=20, help="steps of each run")
    parser.add_argument("--rows", metavar="REGEX", default="", help="regular expression")
    out = REPO / "outputs/torchtitan"
    parser.add_argument("--out", type=Path, default=out, help="data and runs: %(default)s")
    parser.add_argument("--venv", type=Path, help="torchtitan's environment (default: OUT/venv)")
    arguments = parser.parse_args()
    if arguments.steps <= LEFT_OUT + 1:
        parser.error(f"--steps {arguments.steps}: the first {LEFT_OUT} do not count, give more")
    if not any(re.search(arguments.rows, row.name) for row in all_rows()):
        names = "\n  ".join(row.name for row in all_rows())
        parser.error(f"--rows {arguments.rows!r} matches none of\n  {names}")
    arguments.out = arguments.out.resolve()
    arguments.venv = (arguments.venv or arguments.out / "venv").absolute()
    return arguments


def memory_of_torch() -> float:
    """Returns MiB that a process with torch alone has in memory."""
    script = "import os, torch; from scripts.bench.processes import resident_mib as of; "
    command = [sys.executable, "-c", script + "print(of(os.getpid())['VmRSS'])"]
    return float(subprocess.run(command, cwd=REPO, capture_output=True, check=True).stdout)


def run_round(row: Row, order: Sequence[str], jobs: Jobs, steps: int) -> None:
    """Runs each program once; the round counts as a whole or not at all."""
    runs = {program: jobs.run(program, row, steps) for program in order}
    if problem := different_models(row.model, runs["torchtitan"].num_parameters):
        sys.exit(problem)
    for program, run in runs.items():
        row.runs.setdefault(program, []).append(run)


def different_models(model: Model, theirs: int | None) -> str | None:
    """Returns why the programs' models cannot be compared, if they cannot.

    theirs: the parameters of torchtitan's model, which it prints; titan_moe prints none.
    """
    size = total(model.config)
    counts = {size.dense + size.routed, theirs}
    if counts == {model.num_parameters}:
        return None
    return f"{model.name}: programs have {counts} parameters, expected {model.num_parameters:,}"


# --- figures --------------------------------------------------------------------------------------


def figures_of(row: Row, program: str, bare_mib: float) -> dict[str, float]:
    """Returns one program's medians in a row; memory in MiB beyond `bare_mib`, times in seconds."""
    runs, median = row.runs[program], statistics.median
    growth = median(run.resident_mib[-1] - run.resident_mib[LEFT_OUT] for run in runs)
    return {
        "tokens/s": median(rate for run in runs for rate in run.tokens_per_second()),
        "first step": median(run.seconds[0] for run in runs),
        "memory": median(run.peak_mib for run in runs) - bare_mib,
        "growth": growth / median(run.resident_mib[LEFT_OUT] - bare_mib for run in runs),
        "first loss": runs[0].losses[0],
    }


def needed_mib(row: Row) -> float:
    """Returns MiB that no program of the row's layout can do without."""
    parts = part_sizes(row.model.config)
    stored = 4 * 4 * sum(sum(size) for size in parts.values()) / row.layout.num_ranks
    gathered = 0.0
    if row.layout.num_ranks > 1 or row.dtype != "float32":
        degree = row.layout.expert_parallel_degree
        largest = max(size.dense + size.routed / degree for size in parts.values())
        gathered = BYTES[row.dtype] * largest
    return (stored + gathered) / 2**20


def goals(row: Row, bare_mib: float) -> list[Goal]:
    """Returns each goal with our ratio to torchtitan; for growth, with the growth itself."""
    ours = figures_of(row, "titan_moe", bare_mib)
    theirs = figures_of(row, "torchtitan", bare_mib)
    faster = _FASTER[row.dtype]
    # The ratio is taken in each round: between rounds the machine's rate may change.
    pairs = zip(*(row.runs[program] for program in PROGRAMS), strict=True)
    rates = ([statistics.median(run.tokens_per_second()) for run in pair] for pair in pairs)
    speed = statistics.median(our / their for our, their in rates)
    memory = ours["memory"] / theirs["memory"]
    most = max(_MEMORY, needed_mib(row) / theirs["memory"])
    return [
        Goal("tokens/s", speed, faster),
        Goal("memory", memory, most, at_most=True),
        Goal("growth", ours["growth"], _GROWTH, at_most=True),
    ]


def write(file: Path | None, rows: list[Row], bare_mib: float) -> None:
    """Writes everything measured so far, if asked for."""
    figures = [
        {
            "name": row.name,
            "runs": {program: [asdict(run) for run in runs] for program, runs in row.runs.items()},
            "figures": {program: figures_of(row, program, bare_mib) for program in row.runs},
            "goals": [goal.as_dict() for goal in goals(row, bare_mib)],
        }
        for row in rows
        if row.runs
    ]
    facts = {"command": sys.argv, "code": running_code(), "bare_mib": bare_mib}
    write_json(file, {**facts, "rows": figures})


def print_tables(rows: list[Row], bare_mib: float) -> None:
    """Prints a table of figures by row and program, and the goals of each row."""
    heads = ["", "program", "tokens/s", "first step", "memory, MiB", "growth", "first loss"]
    cells = []
    for row in rows:
        for program, runs in row.runs.items():
            figures = figures_of(row, program, bare_mib)
            rates = [rate for run in runs for rate in run.tokens_per_second()]
            memory, growth = f"{figures['memory']:,.0f}", f"{figures['growth']:+.0%}"
            times = [spread(rates), figures["first step"]]
            cells.append([row.name, program, *times, memory, growth, figures["first loss"]])
    print_table(heads, cells)
    for row in rows:
        print(f"\n{row.name}", *goals(row, bare_mib), sep="\n  ")


if __name__ == "__main__":
    sys.exit(main())
