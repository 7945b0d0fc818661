"""Tokens/s and peak memory of the debug models on the CPU, at 1 and at 2 ranks.

    python -m scripts.bench.training       # every row, 3 times: half an hour on 2 cores
    python -m scripts.bench.training --rows '2M.*float32' --repeats 1 --json figures.json

Each row is a real run (`torchrun -m titan_moe train` on the Python sources, all of the loop but
validation and checkpoints) and its metrics.jsonl. The rows take turns, so that a slow spell of the
machine hits all of them. Every row computes on 2 threads in all: one per rank at 2 ranks.

Tokens/s are those of the whole job: the median over the steps from the 6th on of all rounds, with
the slowest and the fastest step. Peak memory is rank 0's resident set, Python and torch included.
The last column is the model's FLOP/s, without recomputation, as a share of what a plain matrix
product in the row's compute type reaches on the same threads.
"""

import re
import statistics
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
import torch
from tqdm import tqdm

from scripts.bench.measure import (
    TRAIN,
    best_rate,
    describe,
    matmul_tflops,
    options,
    print_facts,
    print_matmul,
    print_table,
    run_job,
    torchrun,
    write_json,
)
from titan_moe.metrics.jsonl import read_json_lines

_THREADS = 2
_SEQ_LEN = 256
_GLOBAL_BATCH_SIZE = 8
_WARMUP_STEPS = 5

_MODELS = (
    "deepseek_v3/2M",
    "deepseek_v3/debugmodel",
    "qwen3/debugmodel_moe",
    "qwen3/debugmodel_moe_512",
)
_DTYPES = ("float32", "bfloat16")
# (layout, ranks, expert_parallel_degree)
_LAYOUTS = (("1 rank", 1, 1), ("FSDP 2", 2, 1), ("FSDP 2, EP 2", 2, 2))

_COLUMNS = ("model", "compute", "layout", "tokens/s", "min-max", "peak GiB", "GFLOP/s", "of matmul")


@dataclass
class Row:
    """One line of the table, and what its runs measured so far."""

    model: str
    dtype: str
    layout: str
    num_ranks: int
    expert_parallel_degree: int
    tokens_per_second: list[float] = field(default_factory=list)
    """One value per step from the 6th on, of all rounds."""
    tflops: list[float] = field(default_factory=list)
    """TFLOP/s of all ranks together, for the same steps."""
    peak_gib: list[float] = field(default_factory=list)
    """One value per round."""

    @property
    def name(self) -> str:
        """Text that --rows is matched against."""
        return f"{self.model} {self.dtype} {self.layout}"

    def add(self, lines: list[dict[str, float]]) -> None:
        """Take the metrics.jsonl of one run."""
        for line in lines[_WARMUP_STEPS:]:
            self.tokens_per_second.append(line["tokens_per_second"])
            self.tflops.append(line["tflops_per_device"] * self.num_ranks)
        self.peak_gib.append(lines[-1]["memory/peak_gib"])

    def cells(self, matmul_tflops: float) -> list[str]:
        """The texts of the table's columns; `matmul_tflops` in this row's type."""
        rates = self.tokens_per_second
        tflops = statistics.median(self.tflops)
        return [
            self.model,
            self.dtype,
            self.layout,
            f"{statistics.median(rates):,.0f}",
            f"{min(rates):,.0f}-{max(rates):,.0f}",
            f"{statistics.median(self.peak_gib):.2f}",
            f"{1e3 * tflops:.1f}",
            f"{tflops / matmul_tflops:.0%}",
        ]


def main() -> None:
    parser = options(__doc__, repeats=3, seeded=True)
    parser.add_argument("--steps", type=int, default=15, help="steps of each run")
    parser.add_argument("--rows", metavar="PATTERN", default="", help="regular expression")
    arguments = parser.parse_args()
    if arguments.steps <= _WARMUP_STEPS:
        parser.error(f"--steps {arguments.steps} must be more than the {_WARMUP_STEPS} left out")
    rows = [row for row in all_rows() if re.search(arguments.rows, row.name)]
    if not rows:
        names = "\n  ".join(row.name for row in all_rows())
        parser.error(f"--rows {arguments.rows!r} matches none of\n  {names}")

    torch.set_num_threads(_THREADS)
    matmul: dict[str, list[dict[int, float]]] = {dtype: [] for dtype in _DTYPES}
    with tqdm(total=arguments.repeats * len(rows), unit="run") as progress:
        for _ in range(arguments.repeats):
            for dtype, rounds in matmul.items():
                rounds.append(matmul_tflops(getattr(torch, dtype)))
            for row in rows:
                progress.set_description(row.name)
                row.add(run(row, arguments.steps, arguments.seed))
                progress.update()

    print_facts(describe() | {"threads": _THREADS})
    print_matmul(matmul)
    title = f"{_GLOBAL_BATCH_SIZE} rows of {_SEQ_LEN} tokens a step"
    print_table(_COLUMNS, [row.cells(best_rate(matmul[row.dtype])) for row in rows], title)
    figures = {"matmul_tflops": matmul, "rows": [asdict(row) for row in rows]}
    write_json(arguments.json, figures)


def all_rows() -> list[Row]:
    return [
        Row(model, dtype, *layout) for model in _MODELS for dtype in _DTYPES for layout in _LAYOUTS
    ]


def run(row: Row, steps: int, seed: int) -> list[dict[str, float]]:
    """Train once and return the logged steps; ends this script when the run fails."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "bench.toml"
        tables = job_tables(row, steps, folder, seed)
        config.write_text(tomli_w.dumps(tables), encoding="utf-8")
        command = [*torchrun(row.num_ranks), *TRAIN, "--job.config_file", str(config)]
        run_job(command, {"OMP_NUM_THREADS": str(_THREADS // row.num_ranks)})
        return read_json_lines(Path(folder) / "metrics.jsonl")


def job_tables(row: Row, steps: int, folder: str, seed: int = 0) -> dict[str, dict[str, Any]]:
    """The configuration of a row's run."""
    name, flavor = row.model.split("/")
    return {
        "job": {"dump_folder": folder},
        "metrics": {"log_freq": 1},
        "model": {"name": name, "flavor": flavor},
        "training": {
            "dataset": "stdlib",
            "steps": steps,
            "seq_len": _SEQ_LEN,
            "local_batch_size": _GLOBAL_BATCH_SIZE // row.num_ranks,
            "global_batch_size": _GLOBAL_BATCH_SIZE,
            "mixed_precision_param": row.dtype,
        },
        "lr_scheduler": {"warmup_steps": 2},
        "parallelism": {"expert_parallel_degree": row.expert_parallel_degree},
        "activation_checkpoint": {"mode": "none"},
        "debug": {"seed": seed},
    }


if __name__ == "__main__":
    main()
