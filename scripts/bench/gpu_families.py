"""Every family trains on the device, and a repeated deterministic run has the same bits.

    python -m scripts.bench.gpu_families --json gpu_families.json
    python -m scripts.bench.gpu_families --device cpu

Three steps of each family's debug model in bfloat16, twice from the same seed: losses, gradient
norms and every parameter after the last step.
"""

from collections.abc import Sequence
from typing import Any

import torch

from scripts.bench.measure import (
    Goal,
    describe,
    finish,
    gpu_options,
    is_toy,
    parse_gpu,
    print_facts,
    print_table,
)
from scripts.bench.train_steps import first_gpu_or_cpu, new_training, why, world_of_one

FAMILIES = [
    ("deepseek_v3", "debugmodel"),
    ("deepseek_v3", "gate"),  # With multi-token prediction.
    ("gpt_oss", "debugmodel"),
    ("llama4", "debugmodel"),
    ("mixtral", "debugmodel"),
    ("qwen3", "debugmodel"),
    ("qwen3", "debugmodel_moe"),
]
TOY_FAMILIES = [("deepseek_v3", "gate")]
STEPS = 3


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_gpu(gpu_options(__doc__), argv)
    device = first_gpu_or_cpu(arguments.device)
    rows = []
    torch.use_deterministic_algorithms(True)
    try:
        with world_of_one(device):
            for family in TOY_FAMILIES if is_toy(arguments) else FAMILIES:
                rows.append(measure(family, device, arguments.seed))
    finally:
        torch.use_deterministic_algorithms(False)
    print_facts(describe(arguments.device))
    heads = ["model", "first loss", "last loss", "same bits", "failed"]
    print_table(heads, [[row.get(head, "") for head in heads] for row in rows])
    bits = [Goal(f"{row['model']}, same bits", float(row["same bits"]), 1) for row in rows]
    falls = [
        Goal(f"{row['model']}, last loss", row["last loss"], row["first loss"], at_most=True)
        for row in rows
        if "last loss" in row
    ]
    finish(arguments, rows, bits + falls)


def measure(family: tuple[str, str], device: torch.device, seed: int) -> dict:
    row = {"model": "/".join(family), "same bits": False}
    try:
        first, again = (trained(family, device, seed) for _ in range(2))
    except Exception as error:
        return row | {"failed": why(error)}
    losses = first[0]
    return row | {
        "same bits": first == again,
        "first loss": losses[0],
        "last loss": losses[-1],
    }


def trained(family: tuple[str, str], device: torch.device, seed: int) -> tuple[list, list, list]:
    """Losses, norms, and a number of each parameter."""
    name, flavor = family
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": name, "flavor": flavor},
        "training": {"seq_len": 128, "local_batch_size": 2},
        "optimizer": {"lr": 1e-3},
        "parallelism": {"data_parallel_shard_degree": 1},
        "moe": {"row_alignment": 16},
        "activation_checkpoint": {"mode": "none"},
        "debug": {"deterministic": True},
    }
    training = new_training(tables, device, seed=seed)
    results = [training.run() for _ in range(STEPS)]
    losses, norms = [r.loss for r in results], [r.grad_norm for r in results]
    return losses, norms, training.checksums()


if __name__ == "__main__":
    main()
