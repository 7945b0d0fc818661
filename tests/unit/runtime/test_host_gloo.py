"""Collectives of ranks that share a GPU: each runs on copies, and brings back what it wrote."""

import os
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from titan_moe.runtime.host_gloo import BACKEND, HostGloo
from titan_moe.runtime.ranks import run_on_ranks

_ops = torch.ops._c10d_functional


class Watched:
    """The group over gloo below a HostGloo; notes its calls and the tensors that they are given."""

    def __init__(self, group: Any) -> None:
        self._group, self.calls = group, 0
        self.seen: set[int] = set()

    def __getattr__(self, name: str) -> Callable[..., dist.Work]:
        self.calls += 1

        def call(*arguments: Any) -> dist.Work:
            tensors = [each for each in tree_leaves(arguments) if isinstance(each, Tensor)]
            self.seen |= {each.data_ptr() for each in tensors}
            return getattr(self._group, name)(*arguments)

        return call


def call_each() -> list[str]:
    """Returns the collectives that do not reach gloo once, on tensors that are not the caller's."""
    group: Any = dist.group.WORLD
    name, one, x = group.group_name, torch.ones(1), torch.ones(2)
    calls = {
        "all_reduce": lambda: dist.all_reduce(one),
        "broadcast": lambda: dist.broadcast(one, 0),
        "all_gather": lambda: dist.all_gather(list(x.unbind()), one[0]),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(x, one),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(one, x),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.zeros(2), x),
        "functional all_reduce": lambda: _ops.all_reduce(one, "sum", name),
        "functional all_gather": lambda: _ops.all_gather_into_tensor(one, 2, name),
        "functional reduce_scatter": lambda: _ops.reduce_scatter_tensor(x, "sum", 2, name),
        "functional all_to_all": lambda: _ops.all_to_all_single(x, [1, 1], [1, 1], name),
    }
    threads = group._get_backend(torch.device("cuda")).options._threads
    problems = [f"{threads} threads write the names of operations"] if threads > 1 else []
    with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="none0"), pytest.raises(RuntimeError):
        dist.new_group(backend=BACKEND)  # It heeds the interface, which is not there.
    for each, call in calls.items():
        plain, group.gloo = group.gloo, Watched(group.gloo)
        if (result := call()) is not None:
            _ops.wait_tensor(result)
        if group.gloo.calls != 1 or group.gloo.seen & {one.data_ptr(), x.data_ptr()}:
            problems.append(each)
        group.gloo = plain
    return problems


def test_gloo_never_sees_a_tensor_of_the_caller() -> None:
    assert run_on_ranks(call_each, 2, share_gpus=True) == [[], []]


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


def test_sends_copy_their_tensor_and_results_arrive_once() -> None:
    results = run_on_ranks(pass_on, 2, share_gpus=True)
    assert results == [([9], [2], 5), ([9], [1], 5)]


def test_every_collective_of_torch_goes_through_the_host() -> None:
    words = re.compile(r"^(?!__).*(gather|reduce|scatter|all_?to_?all|broadcast)|^(send|recv)$")
    left = [
        name
        for name in dir(dist.ProcessGroup)
        if words.search(name) and getattr(HostGloo, name) is getattr(dist.ProcessGroup, name)
    ]
    assert left == []
