"""Exchanges through symmetric memory: torch's signature, and what the emulation refuses."""

import pytest
import torch

from titan_moe.comm import symmetric_memory
from titan_moe.comm.symmetric_memory import Channel
from titan_moe.config.errors import ConfigError
from titan_moe.moe.config import rows_of_buffers
from titan_moe.runtime.ranks import RankError, run_on_ranks

CPU = torch.device("cpu")


def test_torch_has_the_operation_in_the_form_that_is_emulated() -> None:
    assert str(torch.ops.symm_mem.all_to_all_vdev.default._schema) == (
        "symm_mem::all_to_all_vdev(Tensor input, Tensor(a!) out, Tensor in_splits, "
        "Tensor(a!) out_splits_offsets, str group_name) -> ()"
    )


def exchange_twice(bug: str | None) -> list[list[float]]:
    """Rank 0 sends one row to itself and two to the other, which sends one to each; back and forth.
    What was received, and what came home."""
    import torch.distributed as dist

    channel = Channel(dist.group.WORLD, 4, 2, torch.float64, CPU, None)
    if bug == "one buffer":
        channel._turns = iter([next(channel._turns)] * 9)
    if bug == "one place for sizes":
        first, second = next(channel._turns), next(channel._turns)
        channel._turns = iter([first, (*second[:2], first[2])] * 9)
    rank = dist.get_rank()
    sent_P, received_P = torch.tensor([[[1, 2], [1, 1]], [[1, 1], [2, 1]]])[rank]
    if bug == "more than the buffer holds":
        sent_P = sent_P * 2
    x_RD = torch.arange(6.0, dtype=torch.float64).view(3, 2)[: 3 - rank] + 10 * rank
    found = []
    for _ in range(2):
        there = channel.wait(channel.start(x_RD, sent_P, 4))
        back = channel.wait(channel.start(there, received_P, 4))
        found += [there.tolist(), back.tolist()]
        x_RD = x_RD + 100
    return found


def test_rows_arrive_in_the_order_of_ranks_and_come_home() -> None:
    (one, two) = run_on_ranks(exchange_twice, 2, None)
    assert one[0][:2] == [[0, 1], [10, 11]] and two[0][:3] == [[2, 3], [4, 5], [12, 13]]
    assert one[1][:3] == [[0, 1], [2, 3], [4, 5]] and two[3][:2] == [[110, 111], [112, 113]]
    nothing = torch.tensor([*one[0][2:], *two[1][2:]])
    assert nothing.isnan().all()


@pytest.mark.parametrize(
    "bug, said",
    [
        ("one buffer", "while peers read it"),
        ("one place for sizes", "while they were read"),
        ("more than the buffer holds", "more rows than"),
    ],
)
def test_emulation_raises_for_misuse_that_a_gpu_would_not_notice(bug: str, said: str) -> None:
    with pytest.raises(RankError, match=said):
        run_on_ranks(exchange_twice, 2, bug)


def test_error_without_nvshmem_names_other_dispatchers(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed._symmetric_memory as symm_mem

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(symm_mem, "is_nvshmem_available", lambda: False)
    with pytest.raises(ConfigError, match=r"NVSHMEM is not found.*, or choose deduplicated or"):
        symmetric_memory.check_available(gpu)
    symmetric_memory.check_available(CPU)


@pytest.mark.parametrize(
    "tokens, top_k, experts, ep, factor, rows",
    [
        (10, 4, 8, 2, None, 80),
        (10, 4, 8, 4, None, 80),  # No more than two of a token's experts are on one rank.
        (10, 4, 8, 2, 1.25, 50),
        (10, 4, 8, 2, 9.0, 80),
    ],
)
def test_rows_of_buffers_equal_counted_values(tokens, top_k, experts, ep, factor, rows) -> None:
    assert rows_of_buffers(tokens, top_k, experts, ep, factor) == rows
