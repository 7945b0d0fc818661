"""titan_moe beside torchtitan 0.2.2 and transformers' Trainer, in turn, on the CPU.

    python -m scripts.bench.torchtitan.compare --rows 'cmp.*1 rank' --repeats 1
    python -m scripts.bench.torchtitan.compare --repeats 2 --steps 12 \
        --json docs/results/torchtitan.json                 # all rows, about half an hour

The first run makes torchtitan an environment of its own from the package registry (--venv), and
writes the data set and the tokenizer that all programs get (data.py). torchtitan trains on
CPUs with the substitutes of torchtitan_rank.py. 1 thread per rank, no recomputation, 8 rows of
256 tokens a step, plain causal attention in both.

On one rank transformers' own Trainer takes part too (trainer_rank.py), in a second environment
beside the first.

All see the same documents through the same tokenizer, with the same end-of-document token. Rows
differ in their order: titan_moe and the Trainer shuffle, torchtitan takes documents as they come,
by rank. Weights are each program's own draw, by its own rule; the first losses, near
ln(2048) = 7.6, are printed.

In each round a row is: a torchrun job that only imports torch and starts gloo, then one run of each
program, whose order alternates. A row whose job fails is not in that round, and the exit code is 1.
Medians over the rounds; tokens/s over all steps from the 6th on, and their ratio of each round.
Memory is the peak of the largest rank's resident set beyond that of a process with torch alone;
growth is from the 6th to the last step. The share of the matmul rate is the model's own FLOPs
(forward and backward of active parameters and causal attention) against square products in the
row's type, with as many threads as the row has.

Goals: 1.15 times torchtitan's tokens/s, 1.5 times in bfloat16; 0.7 of its memory, unless more is
needed; at most 2 % of growth. Needed is what no program of the layout can do without:
parameters, gradients and two moments in float32, sharded, and the largest layer gathered in the
row's type where it is sharded or cast.
"""

import argparse
import re
import shlex
import signal
import statistics
import sys
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from scripts.bench.measure import (
    REPO,
    JobFailed,
    best_rate,
    describe,
    matmul_tflops,
    options,
    print_facts,
    print_matmul,
    print_table,
    spread,
    write_json,
)
from scripts.bench.torchtitan.data import write_data
from scripts.bench.torchtitan.runs import (
    GLOBAL_BATCH_SIZE,
    SEQ_LEN,
    TORCHTITAN,
    TRAINER,
    Jobs,
    Layout,
    Model,
    Observed,
    Start,
    bare_start,
    make_environment,
    trainer_environment,
)
from titan_moe.metrics.run_log import model_flops_per_token
from titan_moe.models.config import ModelConfig
from titan_moe.models.registry import model_config
from titan_moe.models.stats import part_sizes, total
from titan_moe.runtime.revision import running_code

FOLDER = REPO / "outputs/torchtitan"
_LEFT_OUT = 5  # Steps at the beginning.
# Goals: times torchtitan's tokens/s, share of its memory, and growth.
_FASTER = {"float32": 1.15, "bfloat16": 1.5}
_MEMORY = 0.7
_GROWTH = 0.02
_BYTES = {"float32": 4, "bfloat16": 2}

_MODELS = (
    Model("cmp", "qwen3", "debugmodel_moe", "peer", 14_428_672, 3e-4),
    Model("ds", "deepseek_v3", "debugmodel", "debugmodel", 33_014_016, 8e-4),
)
_LAYOUTS = (Layout("1 rank", 1, 1), Layout("FSDP 2", 2, 1), Layout("FSDP 2, EP 2", 2, 2))
_DTYPES = ("float32", "bfloat16")
_Matmul = dict[str, list[dict[int, float]]]  # Type and threads -> matmul_tflops of each round.


@dataclass
class Row:
    """One model, type and layout, and what has been measured of it: one value per round."""

    model: Model
    dtype: str
    layout: Layout
    ours: list[Observed] = field(default_factory=list)
    theirs: list[Observed] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    trainer: list[Observed] = field(default_factory=list)
    """Of transformers' Trainer, on one rank alone."""

    @property
    def has_trainer(self) -> bool:
        return self.layout.num_ranks == 1

    @property
    def name(self) -> str:
        """What --rows is matched against."""
        return f"{self.model.name} {self.dtype} {self.layout.name}"


class Goal(NamedTuple):
    """A figure, the bound that it is to keep, and whether it does."""

    figure: float
    bound: float
    met: bool

    def __str__(self) -> str:
        return f"{self.figure:.2f} {'met' if self.met else 'missed'} ({self.bound:.2f})"


@dataclass(frozen=True)
class Figures:
    """One program's figures in one row."""

    tokens_per_second: list[float]
    """Of every step that counts, of all rounds."""
    first_step: float
    """Seconds from the launch to the end of step 1."""
    beyond_torch: float
    """Of these, what a job that only starts gloo does not take; beyond_fsdp: nor one that also
    imports what FSDP2 and torch.optim do."""
    beyond_fsdp: float
    memory_mib: float
    growth_mib: float
    growth: float
    """growth_mib over the memory at the 6th step, both beyond torch alone."""

    @property
    def rate(self) -> float:
        return statistics.median(self.tokens_per_second)


def main() -> int:
    arguments = _arguments()
    rows = [row for row in all_rows() if re.search(arguments.rows, row.name)]
    make_environment(arguments.venv, TORCHTITAN)
    if any(row.has_trainer for row in rows):
        make_environment(trainer_environment(arguments.venv), *TRAINER)
    jobs = Jobs(arguments.out, arguments.venv, *write_data(arguments.out / "text"))
    matmul: _Matmul = {}
    code = 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tqdm(total=arguments.repeats * len(rows), unit="row") as progress:
            for number in range(arguments.repeats):
                for row in rows:
                    progress.set_description(row.name)
                    torch.set_num_threads(row.layout.num_ranks)
                    rates = matmul_tflops(getattr(torch, row.dtype))
                    matmul.setdefault(_matmul_key(row), []).append(rates)
                    try:
                        run(row, jobs, arguments.steps, ours_first=number % 2 == 0)
                    except JobFailed as failure:
                        code = 1
                        print(f"{failure}\n{row.name}: not in round {number + 1}", file=sys.stderr)
                    write(arguments.json, rows, matmul)
                    progress.update()
    except KeyboardInterrupt:
        print("stopped: what was measured until then", file=sys.stderr)
        code = 130
    print_tables([row for row in rows if row.starts], matmul)
    return code


def write(file: Path | None, rows: list[Row], matmul: _Matmul) -> None:
    """Everything measured so far, where it is asked for."""
    figures = [
        asdict(row) | {"name": row.name, "figures": summary(row, matmul)}
        for row in rows
        if row.starts
    ]
    facts = {"date": f"{date.today()}", "code": running_code(), "peer": TORCHTITAN}
    command = shlex.join(["python", "-m", "scripts.bench.torchtitan.compare", *sys.argv[1:]])
    write_json(file, {"command": command, **facts, "matmul_tflops": matmul, "rows": figures})


def summary(row: Row, matmul: _Matmul) -> dict[str, Any]:
    """A row's figures and goals, as docs/benchmarks.md prints them."""
    programs = {"ours": row.ours, "theirs": row.theirs, "trainer": row.trainer}
    found = {name: figures_of(runs, row.starts) for name, runs in programs.items() if runs}
    best = best_rate(matmul[_matmul_key(row)])
    return {
        **{name: {"rate": each.rate} | asdict(each) for name, each in found.items()},
        "of_matmul": share_of_matmul(row, found["ours"].rate, best),
        "needed_mib": needed_mib(row),
        "goals": {name: goal._asdict() for name, goal in goals(row).items()},
    }


def _arguments() -> argparse.Namespace:
    parser = options(__doc__, repeats=3)
    parser.add_argument("--steps", type=int, default=20, help="steps of each run")
    parser.add_argument("--rows", metavar="REGEX", default="", help="regular expression")
    parser.add_argument(
        "--out", type=Path, default=FOLDER, help="data, tokenizer and runs (default: %(default)s)"
    )
    parser.add_argument(
        "--venv", type=Path, help="torchtitan's environment, made if need be (default: OUT/venv)"
    )
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error(f"--repeats {arguments.repeats}: nothing would be compared, give 1 or more")
    if arguments.steps <= _LEFT_OUT + 1:
        parser.error(f"--steps {arguments.steps}: the first {_LEFT_OUT} do not count, give more")
    if not any(re.search(arguments.rows, row.name) for row in all_rows()):
        names = "\n  ".join(row.name for row in all_rows())
        parser.error(f"--rows {arguments.rows!r} matches none of\n  {names}")
    arguments.out = arguments.out.resolve()
    arguments.venv = (arguments.venv or arguments.out / "venv").absolute()
    return arguments


def all_rows() -> list[Row]:
    return [
        Row(model, dtype, layout) for model in _MODELS for layout in _LAYOUTS for dtype in _DTYPES
    ]


def _matmul_key(row: Row) -> str:
    return f"{row.dtype}, {row.layout.num_ranks} threads"


def run(row: Row, jobs: Jobs, steps: int, *, ours_first: bool) -> None:
    """One round of a row; it counts as a whole or not at all."""
    job = (row.model, row.dtype, row.layout, steps)
    start = bare_start(row.layout.num_ranks)
    if ours_first:
        ours, theirs = jobs.ours(*job), jobs.theirs(*job)
    else:
        theirs, ours = jobs.theirs(*job), jobs.ours(*job)
    trainer = jobs.trainer(row.model, row.dtype, steps) if row.has_trainer else None
    for peer in filter(None, (theirs, trainer)):
        if problem := different_models(row.model, peer.num_parameters):
            sys.exit(problem)
    row.starts.append(start)
    if trainer is not None:
        row.trainer.append(trainer)
    row.ours.append(ours)
    row.theirs.append(theirs)


def different_models(model: Model, theirs: int | None) -> str | None:
    """Why the two programs' models cannot be compared, if they cannot."""
    size = total(_config(model))
    ours = size.dense + size.routed
    if ours == theirs == model.num_parameters:
        return None
    return (
        f"{model.name}: {ours:,} parameters here and {theirs} in a peer, expected "
        f"{model.num_parameters:,}: these are different models"
    )


def _config(model: Model) -> ModelConfig:
    return model_config(model.family, model.our_flavor)


def figures_of(runs: list[Observed], starts: list[Start]) -> Figures:
    """The figures of one program's runs; `starts` are of the same rounds."""
    tokens = GLOBAL_BATCH_SIZE * SEQ_LEN
    rates = [
        tokens / (end - begin)
        for one in runs
        for begin, end in zip(one.seconds[_LEFT_OUT - 1 :], one.seconds[_LEFT_OUT:], strict=False)
    ]
    median = statistics.median
    bare = median(start.memory_mib for start in starts)
    early = median(one.resident_mib[_LEFT_OUT] - bare for one in runs)
    growth = median(one.resident_mib[-1] - one.resident_mib[_LEFT_OUT] for one in runs)
    both = list(zip(runs, starts, strict=True))
    return Figures(
        tokens_per_second=rates,
        first_step=median(one.seconds[0] for one in runs),
        beyond_torch=median(one.seconds[0] - start.torch for one, start in both),
        beyond_fsdp=median(one.seconds[0] - start.fsdp for one, start in both),
        memory_mib=median(one.peak_mib for one in runs) - bare,
        growth_mib=growth,
        growth=growth / early,
    )


def share_of_matmul(row: Row, rate: float, matmul_tflops: float) -> float:
    """The model's FLOPs at `rate` tokens/s over the machine's rate of products."""
    return rate * model_flops_per_token(_config(row.model), SEQ_LEN) / 1e12 / matmul_tflops


def needed_mib(row: Row) -> float:
    """What a rank of the row's layout cannot do without, by arithmetic: see above."""
    parts = part_sizes(_config(row.model))
    stored = 4 * 4 * sum(sum(size) for size in parts.values()) / row.layout.num_ranks
    gathered = 0.0
    if row.layout.num_ranks > 1 or row.dtype != "float32":
        degree = row.layout.expert_parallel_degree
        largest = max(size.dense + size.routed / degree for size in parts.values())
        gathered = _BYTES[row.dtype] * largest
    return (stored + gathered) / 2**20


def goals(row: Row) -> dict[str, Goal]:
    """Each goal with its ratio to torchtitan, or for growth with the growth itself."""
    ours, theirs = figures_of(row.ours, row.starts), figures_of(row.theirs, row.starts)
    rounds = zip(row.ours, row.theirs, row.starts, strict=True)
    # Of each round by itself: between rounds the machine's rate may change.
    speed = statistics.median(
        figures_of([our], [start]).rate / figures_of([their], [start]).rate
        for our, their, start in rounds
    )
    faster = _FASTER[row.dtype]
    memory = ours.memory_mib / theirs.memory_mib
    most = max(_MEMORY, needed_mib(row) / theirs.memory_mib)
    return {
        "tokens/s": Goal(speed, faster, speed >= faster),
        "memory": Goal(memory, most, memory <= most),
        "growth": Goal(ours.growth, _GROWTH, ours.growth <= _GROWTH),
    }


def print_tables(rows: list[Row], matmul: _Matmul) -> None:
    """The machine's rates, speed, start and memory, and the goals; on standard output."""
    print_facts({"": TORCHTITAN, **describe(), "threads per rank": 1})
    print(f"{GLOBAL_BATCH_SIZE} rows of {SEQ_LEN} tokens a step; median (min-max)")
    print_matmul(matmul)
    best = {key: best_rate(rounds) for key, rounds in matmul.items()}
    speed, memory, met = [], [], []
    for row in rows:
        ours, theirs = figures_of(row.ours, row.starts), figures_of(row.theirs, row.starts)
        rate = best[_matmul_key(row)]
        speed.append([row.name, *_speed_cells(row, ours, theirs, rate)])
        memory.append([row.name, *_memory_cells(row, ours, theirs)])
        met.append({"": row.name, **{name: str(goal) for name, goal in goals(row).items()}})
    heads = ["", "titan_moe", "torchtitan", "ratio", "of matmul", "loss of step 1"]
    print_table(heads, speed, "tokens/s")
    heads = ["", "first", "", "beyond torch", "and fsdp", "memory", "", "ratio", "needed"]
    heads += ["growth", ""]
    title = "first step, s from the launch; memory beyond torch alone, MiB; ours, theirs"
    print_table(heads, memory, title)
    heads = ["", "titan_moe", "Trainer", "ratio", "memory", "", "ratio", "loss of step 1"]
    beside = [[row.name, *_trainer_cells(row)] for row in rows if row.trainer]
    print_table(heads, beside, "beside transformers' Trainer: tokens/s; memory, MiB")
    title = "goals: ratio to torchtitan (growth: itself), met or missed (the bound)"
    print_table(list(met[0]) if met else [], [list(row.values()) for row in met], title)


def _speed_cells(row: Row, ours: Figures, theirs: Figures, matmul_tflops: float) -> list[str]:
    return [
        spread(ours.tokens_per_second),
        spread(theirs.tokens_per_second),
        f"{ours.rate / theirs.rate:.2f}",
        f"{share_of_matmul(row, ours.rate, matmul_tflops):.0%}",
        f"{row.ours[0].losses[0]:.4f}, {row.theirs[0].losses[0]:.4f}",
    ]


def _trainer_cells(row: Row) -> list[str]:
    ours, theirs = figures_of(row.ours, row.starts), figures_of(row.trainer, row.starts)
    return [
        spread(ours.tokens_per_second),
        spread(theirs.tokens_per_second),
        f"{ours.rate / theirs.rate:.2f}",
        *(f"{ours.memory_mib:,.0f}", f"{theirs.memory_mib:,.0f}"),
        f"{ours.memory_mib / theirs.memory_mib:.2f}",
        f"{row.ours[0].losses[0]:.4f}, {row.trainer[0].losses[0]:.4f}",
    ]


def _memory_cells(row: Row, ours: Figures, theirs: Figures) -> list[str]:
    return [
        *(f"{ours.first_step:.1f}", f"{theirs.first_step:.1f}"),
        *(f"{ours.beyond_torch:.1f}", f"{ours.beyond_fsdp:.1f}"),
        *(f"{ours.memory_mib:,.0f}", f"{theirs.memory_mib:,.0f}"),
        f"{ours.memory_mib / theirs.memory_mib:.2f}",
        f"{needed_mib(row) / theirs.memory_mib:.2f}",
        *(f"{figures.growth_mib:+,.0f} {figures.growth:+.0%}" for figures in (ours, theirs)),
    ]


if __name__ == "__main__":
    sys.exit(main())
