"""permute_indices and the grouped GEMM against plain loops, as two tables.

    python -m scripts.bench.kernels            # on the GPU where there is one, else on the CPU
    python -m scripts.bench.kernels --device cpu --repeats 20

Times are medians in milliseconds. The variants of a row take turns, so that a slow spell of the
machine hits all of them. Loads of experts are uneven: the busiest gets about 3 times the mean.
"""

import statistics
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from scripts.bench.measure import (
    describe,
    options,
    print_facts,
    print_table,
    take_turns,
    write_json,
)
from titan_moe.ops.grouped_mm import grouped_mm, grouped_mm_loop
from titan_moe.ops.permute_indices import max_padded_rows, permute_indices

# (source ranks, experts, rows, row alignment)
PERMUTE_CASES = [(1, 8, 4096, 1), (8, 8, 65536, 1), (8, 32, 65536, 16), (64, 4, 262144, 128)]
# (experts, rows, D, F)
GEMM_CASES = [(8, 4096, 128, 256), (16, 4096, 512, 1024), (64, 8192, 512, 256)]
CUDA_GEMM_CASES = [(32, 65536, 2048, 1408), (16, 65536, 4096, 1536)]


def main() -> None:
    parser = options(__doc__, repeats=10, seeded=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.set_default_device(arguments.device)
    torch.manual_seed(arguments.seed)
    is_cuda = torch.get_default_device().type == "cuda"
    print_facts(describe(arguments.device) | {"threads": torch.get_num_threads()})

    permuted = []
    for permute_case in PERMUTE_CASES:
        times = milliseconds(permute_variants(*permute_case), arguments.repeats)
        permuted.append([*permute_case, *times, times[0] / times[1]])
    heads = ["ranks", "experts", "rows", "align", "loop", "ours", "loop/ours"]
    title = "permute_indices, ms. loop: one slice assignment per (rank, expert)"
    print_table(heads, permuted, title)

    multiplied = []
    for dtype in (torch.float32, torch.bfloat16):
        for gemm_case in GEMM_CASES + (CUDA_GEMM_CASES if is_cuda else []):
            times = milliseconds(gemm_variants(*gemm_case, dtype=dtype), arguments.repeats)
            dtype_name = str(dtype).removeprefix("torch.")
            multiplied.append([*gemm_case, dtype_name, *times, times[0] / times[-1]])
    gemm_heads = ["experts", "rows", "D", "F", "dtype", "slices", "unbind", "ours", "slices/ours"]
    title = "grouped GEMM forward and backward, ms. slices: x[i:j] @ w[e].T; unbind: our fallback"
    print_table(gemm_heads, multiplied, title)
    rows = {
        "permute_indices": [dict(zip(heads, row, strict=True)) for row in permuted],
        "grouped_gemm": [dict(zip(gemm_heads, row, strict=True)) for row in multiplied],
    }
    write_json(arguments.json, rows, arguments.device)


def milliseconds(variants: Mapping[str, Callable[[], object]], repeats: int) -> list[float]:
    """The median of each variant."""
    return [1e3 * statistics.median(each) for each in take_turns(variants, repeats).values()]


def permute_variants(
    num_ranks: int, num_experts: int, num_rows: int, row_alignment: int
) -> dict[str, Callable[[], object]]:
    """The loop and ours on the same counts."""
    counts_PE = uneven_counts(num_rows, num_ranks * num_experts).view(num_ranks, num_experts)
    sizes = {
        "num_rows": num_rows,
        "row_alignment": row_alignment,
        "max_rows": max_padded_rows(num_rows, num_experts, row_alignment),
    }
    return {
        "loop": partial(permute_loop, counts_PE, **sizes),
        "ours": partial(permute_indices, counts_PE, **sizes),
    }


def permute_loop(
    counts_PE: Tensor, *, num_rows: int, row_alignment: int, max_rows: int
) -> tuple[Tensor, Tensor]:
    """The two index maps, segment by segment."""
    source_R = torch.full((max_rows,), -1)
    position_R = torch.empty(num_rows, dtype=torch.int64)
    source_starts_PE = (counts_PE.flatten().cumsum(0).view_as(counts_PE) - counts_PE).tolist()
    counts = counts_PE.tolist()
    padded = 0
    for expert in range(len(counts[0])):
        start = padded
        for rank in range(len(counts)):
            first, count = source_starts_PE[rank][expert], counts[rank][expert]
            source_R[padded : padded + count] = torch.arange(first, first + count)
            position_R[first : first + count] = torch.arange(padded, padded + count)
            padded += count
        padded += -padded % row_alignment
        if padded == start and row_alignment > 1:
            padded += row_alignment
    return source_R, position_R


def gemm_variants(
    num_experts: int, num_rows: int, dim: int, hidden_dim: int, *, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    """The slices, the unbind loop and ours, forward and backward on the same tensors."""
    offsets_E = uneven_counts(num_rows, num_experts).cumsum(0, dtype=torch.int32)
    x_RD = torch.randn(num_rows, dim, dtype=dtype, requires_grad=True)
    w_EFD = torch.randn(num_experts, hidden_dim, dim, dtype=dtype, requires_grad=True)
    grad_RF = torch.randn(num_rows, hidden_dim, dtype=dtype)

    def step(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        torch.autograd.grad(function(x_RD, w_EFD, offsets_E), (x_RD, w_EFD), grad_RF)

    functions = {"slices": mm_slices, "unbind": grouped_mm_loop, "ours": grouped_mm}
    return {name: partial(step, function) for name, function in functions.items()}


def mm_slices(x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    """The loop that comes to mind first; its backward fills one whole gradient per slice."""
    ends = offsets_E.tolist()
    bounds = zip([0, *ends[:-1]], ends, strict=True)
    return torch.cat([x_RD[i:j] @ w_EFD[e].T for e, (i, j) in enumerate(bounds)])


def uneven_counts(num_rows: int, num_groups: int) -> Tensor:
    """int64 counts that add up to num_rows, from exponentially distributed shares."""
    shares = torch.empty(num_groups, dtype=torch.float64).exponential_()
    ends = (shares.cumsum(0) / shares.sum() * num_rows).round().long()
    return ends.diff(prepend=ends.new_zeros(1))


if __name__ == "__main__":
    main()
