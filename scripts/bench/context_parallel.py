"""Context parallelism's three methods against one process, and how even the work is, as tables.

    python -m scripts.bench.context_parallel                  # 2 gloo ranks on this machine
    python -m scripts.bench.context_parallel --ranks 4 --seq-len 4096 --repeats 20

Times are of one attention core, forward and backward in float32 on the CPU, medians over rounds in
which the variants take turns. Processor time, of the busiest rank, leaves out what other programs
take; "of ideal" compares it with the plain core's divided by the number of ranks. A window is of a
sixteenth of the row, within documents; the plain core computes all pairs and masks them out.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from scripts.bench.measure import options, print_table, take_turns, write_json
from titan_moe.distributed.context_parallel.apply import context_parallel_core, local_positions
from titan_moe.ops.attention import choose_core, first_seen_in_rows
from titan_moe.ops.local_attention import LocalAttention
from titan_moe.testing.ranks import run_on_ranks

HEADS, KV_HEADS, HEAD_DIM = 16, 4, 64
BALANCED = (True, False)
METHODS = ["allgather", "ulysses", "ring"]


class Kind(NamedTuple):
    """Of attention."""

    name: str
    documents: bool
    window: bool = False
    sinks: bool = False

    def local(self, seq_len: int) -> LocalAttention | None:
        return LocalAttention("window", seq_len // 16, global_every=0) if self.window else None


KINDS = [
    Kind("documents", documents=True),
    Kind("causal", documents=False),
    Kind("window", documents=True, window=True),
    Kind("with sinks", documents=True, window=True, sinks=True),
]


def main() -> None:
    parser = options(__doc__, repeats=7, seeded=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=2048)
    arguments = parser.parse_args()
    ranks, seq_len = arguments.ranks, arguments.seq_len
    print(f"{ranks} ranks, {seq_len} tokens, {HEADS} heads, {KV_HEADS} kv heads of {HEAD_DIM}")
    timed = []
    for kind in KINDS:
        per_rank = run_on_ranks(
            times, ranks, kind, seq_len, arguments.repeats, arguments.seed, timeout_s=600
        )
        plain = per_rank[0]["plain", ""][1]
        for variant, (wall, _) in per_rank[0].items():
            busiest = max(found[variant][1] for found in per_rank)
            of_ideal = busiest / (plain if variant == ("plain", "") else plain / ranks)
            timed.append([kind.name, *variant, wall * 1e3, busiest * 1e3, of_ideal])
    heads = ["mask", "method", "balance", "wall ms", "processor ms", "of ideal"]
    print_table(heads, timed)

    work = [
        [
            size,
            kind.name,
            *(mean_unevenness(seq_len, size, kind, balanced=b) for b in (True, False)),
        ]
        for size in (2, 4, 8, 16)
        for kind in KINDS
        if not kind.sinks
    ]
    work_heads = ["ranks", "mask", "head-tail", "consecutive"]
    title = "work of the busiest rank over the mean, in visible (query, key) pairs of one row"
    print_table(work_heads, work, title)
    figures = {
        "times": [dict(zip(heads, row, strict=True)) for row in timed],
        "work": [dict(zip(work_heads, row, strict=True)) for row in work],
    }
    write_json(arguments.json, {"ranks": ranks, "seq_len": seq_len, **figures})


def times(
    kind: Kind, seq_len: int, repeats: int, seed: int
) -> dict[tuple[str, str], tuple[float, float]]:
    """Median seconds of each variant on this rank: wall clock, processor. Plain runs on rank 0."""
    plain = choose_core(mask_documents=kind.documents, device_type="cpu")
    size, rank = dist.get_world_size(), dist.get_rank()
    own_S = torch.arange(seq_len if rank == 0 else 1)
    runs = {("plain", ""): _run_of(plain, kind, own_S, seq_len, seed)}
    for method in METHODS:
        for balanced in BALANCED:
            core = context_parallel_core(
                plain,
                group=dist.group.WORLD,  # type: ignore[arg-type]
                method=method,
                balanced=balanced,
                mask_documents=kind.documents,
                device_type="cpu",
            )
            at_S = local_positions(seq_len, size, rank, balanced=balanced)
            balance = "head-tail" if balanced else "none"
            runs[method, balance] = _run_of(core, kind, at_S, seq_len, seed)
    if rank:
        runs["plain", ""] = lambda: None
    taken = take_turns(runs, repeats, clock=_wall_and_processor, before=dist.barrier)
    return {
        name: (statistics.median(w for w, _ in each), statistics.median(p for _, p in each))
        for name, each in taken.items()
    }


def _wall_and_processor(run: Callable[[], object]) -> tuple[float, float]:
    wall, processor = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - processor


def _run_of(core, kind: Kind, at_S: Tensor, seq_len: int, seed: int) -> Callable[[], None]:  # type: ignore[no-untyped-def]
    """Forward and backward of the core over the tokens at these positions."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(1, len(at_S), heads, HEAD_DIM, generator=generator)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    mask = core.mask(_documents(seq_len), kind.local(seq_len)) if len(at_S) > 1 else None
    sinks = [torch.zeros(HEADS, requires_grad=True)] if kind.sinks else []

    def run() -> None:
        o = core(q, k, v, mask, HEAD_DIM**-0.5, *sinks)
        torch.autograd.grad(o, [q, k, v, *sinks], torch.ones_like(o))

    return run


def _documents(seq_len: int, seed: int = 0) -> Tensor:
    """Documents of a quarter row in the mean, some far longer than others."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(1, seq_len, generator=generator) < 4 / seq_len).long().cumsum(1)


def mean_unevenness(seq_len: int, cp_size: int, kind: Kind, *, balanced: bool) -> float:
    """Over rows with different documents."""
    documents_BS = torch.cat([_documents(seq_len, seed) for seed in range(100)])
    first_BS = first_seen_in_rows(documents_BS, kind.local(seq_len), mask_documents=kind.documents)
    visible_BS = torch.arange(1, seq_len + 1) - first_BS
    return statistics.mean(unevenness(x, cp_size, balanced=balanced) for x in visible_BS)


def unevenness(visible_S: Tensor, cp_size: int, *, balanced: bool) -> float:
    """The busiest rank's visible keys, summed over its queries, over the ranks' mean."""
    seq_len = len(visible_S)
    pairs = [
        int(visible_S[local_positions(seq_len, cp_size, rank, balanced=balanced)].sum())
        for rank in range(cp_size)
    ]
    return max(pairs) * cp_size / sum(pairs)


if __name__ == "__main__":
    main()
