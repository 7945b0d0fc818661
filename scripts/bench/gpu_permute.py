"""permute_indices with gather and combine beside the copy bandwidth.

    python -m scripts.bench.gpu_permute --json gpu_permute.json
    python -m scripts.bench.gpu_permute --device cpu      # the same code on toy sizes

A copy moves two bytes for each that it copies; so are gather (rows read and written) and combine
(rows read, tokens written) counted. The fastest combine adds atomically, in any order (index_add_);
ours in the order of k. tests/gpu counts launches and waits, and compares bits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from scripts.bench.measure import (
    Goal,
    describe,
    gpu_options,
    is_toy,
    keep,
    medians,
    parse_gpu,
    print_facts,
    print_goals,
)
from titan_moe.ops.move_rows import add_rows, copy_rows
from titan_moe.ops.permute_indices import invert, permute_indices

# (T, K, E, D, row alignment)
CASES = [
    (32768, 8, 128, 2048, 1),
    (24576, 8, 128, 1536, 1),
    (32768, 4, 64, 4096, 1),
    (32768, 8, 128, 2048, 16),
]
TOY_CASES = [(64, 2, 8, 32, 16)]
LEAST_BANDWIDTH, MOST_OVER_FASTEST = 0.8, 1.05


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_gpu(gpu_options(__doc__), argv)
    toy, device = is_toy(arguments), arguments.device
    copy_rate = copy_bandwidth(2**20 if toy else 2**30, arguments.repeats, device)
    print_facts(describe(device))
    print(f"copy: {copy_rate / 1e9:.0f} GB/s")
    rows: list[dict[str, Any]] = []
    for case in TOY_CASES if toy else CASES:
        rows.append(measure(case, copy_rate, arguments.repeats, device))
        keep(arguments, rows, [goal for row in rows for goal in goals_of(row)])
    print_goals(arguments, [goal for row in rows for goal in goals_of(row)])


def goals_of(row: dict[str, Any]) -> list[Goal]:
    name = f"T {row['T']} K {row['K']} D {row['D']} alignment {row['alignment']}"
    return [
        Goal(f"{name}, all three of copy", row["of copy"], LEAST_BANDWIDTH),
        Goal(
            f"{name}, combine over index_add_",
            row["over index_add_"],
            MOST_OVER_FASTEST,
            at_most=True,
        ),
    ]


def copy_bandwidth(num_bytes: int, repeats: int, device: str) -> float:
    """Returns bytes moved per second by a plain copy."""
    source = torch.zeros(num_bytes, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    (seconds,) = medians({"copy": lambda: target.copy_(source)}, repeats, device).values()
    return 2 * num_bytes / seconds


def measure(
    case: tuple[int, int, int, int, int], copy_rate: float, repeats: int, device: str
) -> dict[str, Any]:
    num_tokens, top_k, num_experts, dim, alignment = case
    with torch.device(device):
        x_TD = torch.randn(num_tokens, dim, dtype=torch.bfloat16)
        experts_TK = torch.rand(num_tokens, num_experts).topk(top_k).indices
    order_N = experts_TK.flatten().sort(stable=True).indices
    counts_1E = torch.bincount(experts_TK.flatten(), minlength=num_experts)[None]
    num_rows = num_tokens * top_k
    maps = permute_indices(counts_1E, num_rows, alignment)
    source_R = torch.where(maps.source_R < 0, -1, (order_N // top_k)[maps.source_R.clamp_min(0)])
    rows_TK = maps.position_R[invert(order_N)].view(num_tokens, top_k)
    y_RD = copy_rows(x_TD, source_R)
    token_R = source_R.clamp_min(0)
    total_TD = torch.zeros_like(x_TD)

    pieces: list[Callable[[], object]] = [
        lambda: permute_indices(counts_1E, num_rows, alignment),
        lambda: copy_rows(x_TD, source_R),
        lambda: add_rows(y_RD, rows_TK),
        lambda: total_TD.zero_().index_add_(0, token_R, y_RD),
    ]
    seconds = medians(dict(enumerate(pieces)), repeats, device)
    indices_s, gather_s, combine_s, atomic_s = seconds.values()
    gather_bytes = (num_rows + len(source_R)) * dim * 2
    combine_bytes = (num_rows + num_tokens) * dim * 2
    whole = (gather_bytes + combine_bytes) / (indices_s + gather_s + combine_s)
    return {
        "T": num_tokens,
        "K": top_k,
        "E": num_experts,
        "D": dim,
        "alignment": alignment,
        "copy GB/s": copy_rate / 1e9,
        "indices us": 1e6 * indices_s,
        "gather us": 1e6 * gather_s,
        "combine us": 1e6 * combine_s,
        "gather GB": gather_bytes / 1e9,
        "combine GB": combine_bytes / 1e9,
        "gather of copy": gather_bytes / gather_s / copy_rate,
        "combine of copy": combine_bytes / combine_s / copy_rate,
        "of copy": whole / copy_rate,
        "over index_add_": combine_s / atomic_s,
    }


if __name__ == "__main__":
    main()
