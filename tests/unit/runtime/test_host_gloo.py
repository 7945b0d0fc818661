"""Collectives of ranks that share a GPU: each runs on copies, and brings back what it wrote."""

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.runtime.host_gloo import HostGloo
from titan_moe.runtime.ranks import run_on_ranks

_ops = torch.ops._c10d_functional


class Watched:
    """The group over gloo below a HostGloo; notes which tensors it is given."""

    def __init__(self, group: Any) -> None:
        self._group, self.calls = group, 0
        self.seen: set[int] = set()

    def __getattr__(self, name: str) -> Callable[..., dist.Work]:
        def call(*arguments: Any) -> dist.Work:
            self.calls += 1
            self.seen |= {each.data_ptr() for each in tensors_in(arguments)}
            return getattr(self._group, name)(*arguments)

        return call


def tensors_in(argument: Any) -> list[Tensor]:
    if isinstance(argument, list | tuple):
        return [tensor for each in argument for tensor in tensors_in(each)]
    return [argument] if isinstance(argument, Tensor) else []


def collectives(rank: int) -> dict[str, tuple[Callable[[], Any], list[Tensor], list[float]]]:
    """Each collective of two ranks with its arguments, and what it must leave in the first."""
    x, pair = torch.tensor([1.0 + rank]), torch.tensor([10.0, 20.0]) + rank
    one, two, name = torch.zeros(1), torch.zeros(2), dist.group.WORLD.group_name
    halves = list(torch.zeros(2, 1).unbind())
    reduced = x.clone()
    own = [21.0 + 20 * rank]
    sent = [10.0 + 10 * rank, 11.0 + 10 * rank]
    return {
        "all_reduce": (lambda: dist.all_reduce(reduced), [reduced], [3]),
        "broadcast": (lambda: dist.broadcast(one if rank else x, 0), [one if rank else x], [1]),
        "all_gather": (lambda: dist.all_gather(halves, x), halves, [1, 2]),
        "all_gather_into": (lambda: dist.all_gather_into_tensor(two, x), [two], [1, 2]),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(one, pair), [one], own),
        "all_to_all": (lambda: dist.all_to_all_single(two, pair), [two], sent),
        "functional all_reduce": (lambda: _ops.all_reduce(x, "sum", name), [x], [3]),
        "functional all_gather": (lambda: _ops.all_gather_into_tensor(x, 2, name), [x], [1, 2]),
        "functional reduce_scatter": (
            lambda: _ops.reduce_scatter_tensor(pair, "sum", 2, name),
            [pair],
            own,
        ),
        "functional all_to_all": (
            lambda: _ops.all_to_all_single(pair, [1, 1], [1, 1], name),
            [pair],
            sent,
        ),
    }


def try_all() -> list[str]:
    """Returns a line for each collective that leaves something else, or that gloo runs on its
    caller's own tensors."""
    group: Any = dist.group.WORLD
    group.gloo = watched = Watched(group.gloo)
    problems = []
    for name, (call, given, expected) in collectives(dist.get_rank()).items():
        watched.calls, watched.seen = 0, set()
        result = call()
        found = given if result is None else [_ops.wait_tensor(result)]
        if torch.cat(found).tolist() != expected:
            problems.append(f"{name}: {found}")
        if watched.calls != 1 or watched.seen & {each.data_ptr() for each in [*given, *found]}:
            problems.append(f"{name}: gloo has the caller's tensors")
    return problems


def test_each_collective_runs_on_copies_and_brings_its_results_back() -> None:
    assert run_on_ranks(try_all, 2, share_gpus=True) == [[], []]


def pass_on() -> tuple[list[float], list[float], float]:
    """Each rank sends to the other before it receives, and writes to what it has sent."""
    rank = dist.get_rank()
    x, received = torch.tensor([1.0 + rank]), torch.zeros(1)
    works = [dist.isend(x, 1 - rank), dist.irecv(received, 1 - rank)]
    x.fill_(9)
    for work in works:
        work.wait()
    after = received.tolist()
    received.fill_(5)
    works[1].wait()
    return x.tolist(), after, received.item()


def test_sends_are_of_what_was_there_and_results_come_once() -> None:
    results = run_on_ranks(pass_on, 2, share_gpus=True)
    assert results == [([9], [2], 5), ([9], [1], 5)]


def test_no_collective_of_this_torch_is_left_to_gloo() -> None:
    words = re.compile(r"^(?!__).*(gather|reduce|scatter|all_?to_?all|broadcast)|^(send|recv)$")
    left = [
        name
        for name in dir(dist.ProcessGroup)
        if words.search(name) and getattr(HostGloo, name) is getattr(dist.ProcessGroup, name)
    ]
    assert left == []
