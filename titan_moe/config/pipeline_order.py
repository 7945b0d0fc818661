"""What each rank of a pipeline does, in which order, and how long it waits. No torch.

An order is written in letters: F1 is a forward of the rank's second stage, B a whole backward, I
that of the inputs, W that of the weights; "F0+B1" are two that torch runs as one. Microbatches
follow by counting. The orders are torch 2.13's (distributed/pipelining/schedules.py), restated;
tests compare them. Sources: 1F1B and Interleaved1F1B arXiv 2104.04473, GPipe 1811.06965, LoopedBFS
2211.05953, InterleavedZeroBubble (ZB-1P) and ZBVZeroBubble 2401.10241, DualPipeV 2412.19437.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from titan_moe.config.pipeline import SCHEDULES, stages_of_rank


class Work(NamedTuple):
    """One step of one microbatch on one stage."""

    kind: str
    """F: forward; B: backward; I: backward of inputs; W: backward of weights."""
    stage: int
    microbatch: int


Order = list[tuple[Work, ...]]
"""A rank's work; what stands in one tuple hands its results on when the whole tuple is done."""

# A forward, and each half of a backward, take equally long.
_COST = {"F": 1, "I": 1, "W": 1, "B": 2}


def pipeline_order(schedule: str, num_ranks: int, stages: int, microbatches: int) -> list[Order]:
    """The order of every rank."""
    orders = []
    for rank in range(num_ranks):
        own = stages_of_rank(SCHEDULES[schedule], rank, num_ranks, stages)
        letters = _letters(schedule, rank, num_ranks, len(own), microbatches)
        orders.append(_number(letters, own, microbatches, mirrored=schedule == "LoopedBFS"))
    return orders


def bubble_fraction(
    schedule: str,
    num_ranks: int,
    stages: int,
    microbatches: int,
    stage_weights: Sequence[float] | None = None,
) -> float:
    """Share of the ranks' time in which they wait: 1 - work / (ranks * time of the slowest rank).

    By running the order against its dependencies, with forward : backward of inputs : backward of
    weights as 1 : 1 : 1 and nothing for communication.

    Args:
        stage_weights: relative cost of each stage; all alike if left out.
    """
    weights = list(stage_weights or [1.0] * stages)
    orders = pipeline_order(schedule, num_ranks, stages, microbatches)
    ends = _run(orders, weights)
    work = 3 * microbatches * sum(weights)
    return 1 - work / (num_ranks * max(ends))


def _letters(schedule: str, rank: int, ranks: int, per_rank: int, microbatches: int) -> list[str]:
    if schedule == "GPipe":
        return ["F0"] * microbatches + ["B0"] * microbatches
    if schedule == "1F1B":
        ahead = min(microbatches, ranks - rank)
        return ["F0"] * ahead + ["B0", "F0"] * (microbatches - ahead) + ["B0"] * ahead
    if schedule == "LoopedBFS":
        forwards = [f"F{own}" for own in range(per_rank) for _ in range(microbatches)]
        return forwards + [
            f"B{own}" for own in reversed(range(per_rank)) for _ in range(microbatches)
        ]
    if schedule == "ZBVZeroBubble":
        return _zero_bubble_v(rank, ranks, microbatches)
    if schedule == "DualPipeV":
        return _dual_pipe_v(rank, ranks, microbatches)
    split = SCHEDULES[schedule].splits_backward
    return _depth_first(rank, ranks, per_rank, microbatches, split=split)


def _depth_first(
    rank: int, ranks: int, per_rank: int, microbatches: int, *, split: bool
) -> list[str]:
    """Rounds of a few microbatches through all of the rank's stages, backwards following."""
    rounds = max(1, microbatches // ranks)
    in_round = microbatches // rounds
    stages = [own for _ in range(rounds) for own in range(per_rank) for _ in range(in_round)]
    forwards = [f"F{own}" for own in stages]
    last = per_rank - 1
    # A weight's backward waits until `rank` backwards of inputs have passed: they are urgent.
    backwards = [[f"I{last - own}" if split else f"B{last - own}"] for own in stages]
    if split:
        for backward in backwards[rank:]:
            backward.append("W")
    lead = last * in_round + (1 if split else 2) * (ranks - 1 - rank)
    ahead = min(lead, len(forwards))
    letters = forwards[:ahead]
    for step, backward in enumerate(backwards):
        letters += forwards[ahead + step : ahead + step + 1] + backward
    return letters + ["W"] * (min(rank, len(backwards)) if split else 0)


def _zero_bubble_v(rank: int, ranks: int, microbatches: int) -> list[str]:
    # Drawn for enough microbatches to fill the pipeline; `_number` drops those that are not there.
    filled = max(2 * ranks - 1, microbatches)
    below = ranks - rank
    return [
        *["F0"] * (2 * below - 1),
        *["F1", "F0"] * rank,
        *["F1", "I1", "W1"] * below,
        *["F0", "I0", "W0", "F1", "I1", "W1"] * (filled - 2 * ranks + rank + 1),
        *["I0", "W0", "F1", "I1", "W1"] * (below - 1),
        *["I0", "I1"] * rank,
        *["I0", "W0"] * below,
        *["W1"] * rank,
        *["W0"] * rank,
    ]


def _dual_pipe_v(rank: int, ranks: int, microbatches: int) -> list[str]:
    below = ranks - rank - 1
    steady = ["F0+B1", "F1+B0"] * (microbatches - 2 * ranks + rank + 1)
    if rank == ranks - 1:
        steady[:1] = ["F0", "B1"]
    # The second half of the last backwards puts its weights off, to fill what follows.
    whole = (rank + 1) // 2 * 2 + (rank + 1) % 2
    draining = [("B" if i < whole else "I") + str(1 - i % 2) for i in range(2 * (rank + 1))]
    return [
        *["F0"] * (2 * below),
        *["F0", "F1"] * (rank + 1),
        *["I1", "W", "F1"] * below,
        *steady,
        *["B1", "F1+B0"] * below,
        *draining,
        *["W", "I0"] * below,
        *["W"] * (rank + 1),
    ]


def _number(letters: list[str], own: list[int], microbatches: int, *, mirrored: bool) -> Order:
    """Give every letter its stage and microbatch; `mirrored`: backwards begin with the last one."""
    forwards: dict[int, int] = defaultdict(int)
    backwards: dict[int, int] = defaultdict(int)
    pending: list[tuple[int, int]] = []

    def work(letter: str) -> Work:
        kind = letter[0]
        if kind == "W":
            index = 0 if letter == "W" else [str(i) for i, _ in pending].index(letter[1:])
            stage, microbatch = pending.pop(index)
            return Work(kind, own[stage], microbatch)
        stage = int(letter[1:])
        counts = forwards if kind == "F" else backwards
        microbatch = counts[stage]
        counts[stage] += 1
        if kind == "I":
            pending.append((stage, microbatch))
        if kind != "F" and mirrored:
            microbatch = microbatches - 1 - microbatch
        return Work(kind, own[stage], microbatch)

    slots = [
        tuple(work(letter) for letter in slot.split("+"))
        for slot in letters
        if _done(slot, pending)
    ]
    return [slot for slot in slots if all(work.microbatch < microbatches for work in slot)]


def _done(slot: str, pending: list[tuple[int, int]]) -> bool:
    """A W without a waiting weight is nothing to do."""
    return slot != "W" or bool(pending)


def _run(orders: list[Order], weights: list[float]) -> list[float]:
    """When each rank is done; an order that waits for itself is our own bug."""
    clocks = [0.0] * len(orders)
    places = [0] * len(orders)
    ended_at: dict[tuple[str, int, int], float] = {}
    while progress := [rank for rank, order in enumerate(orders) if places[rank] < len(order)]:
        before = sum(places)
        for rank in progress:
            while places[rank] < len(orders[rank]):
                slot = orders[rank][places[rank]]
                needs = [_need(work, len(weights)) for work in slot]
                if any(need is not None and need not in ended_at for need in needs):
                    break
                clock = clocks[rank]
                for work, need in zip(slot, needs, strict=True):
                    start = max(clock, ended_at[need] if need else 0.0)
                    clock = start + _COST[work.kind] * weights[work.stage]
                for work in slot:
                    result = "F" if work.kind == "F" else "B"
                    if work.kind != "W":
                        ended_at[result, work.stage, work.microbatch] = clock
                clocks[rank] = clock
                places[rank] += 1
        assert sum(places) > before, "the order waits for itself"
    return clocks


def _need(work: Work, stages: int) -> tuple[str, int, int] | None:
    """Whose result a step waits for: the stage before it, or in the backward the one after."""
    if work.kind == "F":
        return ("F", work.stage - 1, work.microbatch) if work.stage else None
    if work.kind == "W":
        return None
    if work.stage == stages - 1:
        return ("F", work.stage, work.microbatch)
    return ("B", work.stage + 1, work.microbatch)
