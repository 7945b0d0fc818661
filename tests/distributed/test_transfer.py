"""Transfers carried out on gloo ranks, against slices of the whole tensors."""

import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.planting import Bug, plant
from tests.support.transfers import draw, missing_bytes, whole
from titan_moe.distributed.boxes import sizes
from titan_moe.distributed.dtensor import local_part, local_slices
from titan_moe.distributed.transfer import Traffic, execute, transfer
from titan_moe.distributed.transfer_plan import plan_transfer
from titan_moe.runtime.ranks import RankError, run_on_ranks

_PLAN, _RUN = "titan_moe.distributed.transfer_plan", "titan_moe.distributed.transfer"


def _bug(where: str, right: str, wrong: str) -> Bug:
    return Bug(where, right, wrong, caught_on="", named=(), spared=())


# With what the test must say.
BUGS = {
    "a replica gets what it holds": (
        _bug(f"{_PLAN}:_pieces_of", "source = target if target in of else min(", "source = min("),
        "bytes, not",
    ),
    "a rank counted twice": (
        _bug(f"{_PLAN}:by_box", "[]).append(rank)", "[]).extend([rank, rank])"),
        "bytes, not",
    ),
    "remainder missing": (
        _bug(
            f"{_PLAN}:_cut_box",
            "range(first, last, max(1, rows))",
            "range(first, last - (last - first) % max(1, rows), max(1, rows))",
        ),
        "tensor.",
    ),
    "wrong offset": (_bug(f"{_RUN}:_part", "inside(box, whole)", "box"), "size of tensor"),
    "pieces in another order": (
        _bug(
            f"{_RUN}:_exchange",
            "_places(incoming, received)",
            "_places([of[::-1] for of in incoming], received)",
        ),
        "tensor.",
    ),
}


def move_all(seeds: range, max_bytes: int, bug: Bug | None = None) -> list[str]:
    """What is wrong on this rank after transfers between random layouts."""
    if bug is not None:
        plant(bug)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    wrong = []
    for seed in seeds:
        held, wanted = draw(random.Random(seed), world_size, 20)
        plan = plan_transfer(held, wanted, max_bytes=max_bytes)
        sources = {
            name: [(whole(name, part)[part.box].clone(), part.box)]
            for name, part in held[rank].items()
        }
        targets = {
            name: [(torch.zeros(sizes(part.box), dtype=part.dtype), part.box)]
            for name, part in wanted[rank].items()
        }
        traffic = execute(plan, sources, targets)
        for name, part in wanted[rank].items():
            if not torch.equal(targets[name][0][0], whole(name, part)[part.box]):
                wrong.append(f"seed {seed}: {name} {part}")
        wrong += [f"seed {seed}: {line}" for line in _miscounted(traffic, plan.bytes, plan.calls)]
        total = torch.tensor(sum(traffic.sent))
        dist.all_reduce(total)
        if total != missing_bytes(held, wanted):
            wrong.append(f"seed {seed}: {total} bytes, not {missing_bytes(held, wanted)}")
    return wrong


def _miscounted(traffic: Traffic, planned, calls: int) -> list[str]:
    rank = dist.get_rank()
    lines = []
    if list(traffic.sent) != planned[rank].tolist():
        lines.append(f"sent {traffic.sent}, not {planned[rank]}")
    if list(traffic.received) != planned[:, rank].tolist():
        lines.append(f"received {traffic.received}, not {planned[:, rank]}")
    if traffic.calls != calls:
        lines.append(f"{traffic.calls} calls, not {calls}")
    return lines


@pytest.mark.parametrize("world_size, max_bytes", [(2, 60), (3, 1000), (4, 2**20), (4, 60)])
def test_random_layouts(world_size: int, max_bytes: int) -> None:
    for wrong in run_on_ranks(move_all, world_size, range(20), max_bytes):
        assert wrong == []


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name: str) -> None:
    bug, says = BUGS[name]
    try:
        found = [line for wrong in run_on_ranks(move_all, 4, range(5), 60, bug) for line in wrong]
    except RankError as error:
        found = [str(error)]
    assert any(says in line for line in found), found


def between_meshes() -> list[str]:
    """DTensors of a two-axis mesh to those of a one-axis mesh, plain tensors and scalars."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("c",))
    values = {
        "matrix": torch.arange(30, dtype=torch.float64).view(6, 5),
        "vector": torch.arange(7).to(torch.bfloat16),
        "step": torch.tensor(3.0),
        "load": torch.arange(4),
    }
    sources = values | {
        "matrix": distribute_tensor(values["matrix"], grid, [Shard(1), Shard(0)]),
        "vector": distribute_tensor(values["vector"], grid, [Replicate(), Shard(0)]),
    }
    targets: dict[str, Tensor] = {name: torch.zeros_like(each) for name, each in values.items()}
    targets["matrix"] = distribute_tensor(targets["matrix"], line, [Shard(0)])
    if dist.get_rank() in (0, 3):  # The others hold no "load" before.
        del targets["load"]
    else:
        del sources["load"]
    traffic = transfer(sources, targets)
    wrong = [f"{traffic}"] * (traffic.calls != 1)
    for name, each in targets.items():
        box = local_slices(each) if isinstance(each, DTensor) else ...
        if not torch.equal(local_part(each), values[name][box]):
            wrong.append(f"{name} is {each}")
    return wrong


def test_from_mesh_to_mesh() -> None:
    assert run_on_ranks(between_meshes, 4) == [[], [], [], []]


def wanted_by_one_rank() -> None:
    transfer({}, {"w": torch.zeros(3)} if dist.get_rank() == 1 else {})


def test_every_rank_refuses_alike() -> None:
    with pytest.raises(RankError) as error:
        run_on_ranks(wanted_by_one_rank, 2)
    assert "w: no rank holds 3 of the elements in [0:3] of float32[3]" in str(error.value)
