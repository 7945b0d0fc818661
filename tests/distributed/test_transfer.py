"""Transfers carried out on gloo ranks, against slices of the whole tensors."""

import random

import pytest
import torch
import torch.distributed as dist

from tests.support.planting import Bug, plant
from tests.support.shardings import draw, missing_bytes, whole
from titan_moe.distributed.boxes import sizes
from titan_moe.distributed.transfer import execute, move
from titan_moe.distributed.transfer_plan import plan_transfer
from titan_moe.runtime.ranks import RankError, run_on_ranks

_PLAN, _RUN = "titan_moe.distributed.transfer_plan", "titan_moe.distributed.transfer"


# Each with a part of the message that it must cause.
BUGS = {
    "a replica gets what it holds": (
        Bug(f"{_PLAN}:_pieces_of", "source = target if target in of else min(", "source = min("),
        "bytes, not",
    ),
    "wrong offset": (Bug(f"{_RUN}:_part", "inside(box, whole)", "box"), "size of tensor"),
    "pieces in another order": (
        Bug(
            f"{_RUN}:_exchange",
            "_places(incoming, received)",
            "_places([of[::-1] for of in incoming], received)",
        ),
        "tensor.",
    ),
}


def move_all(seeds: range, max_bytes: int, bug: Bug | None = None) -> list[str]:
    """Returns this rank's errors after transfers between random layouts."""
    if bug is not None:
        plant(bug)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    wrong = []
    for seed in seeds:
        held, wanted = draw(random.Random(seed), world_size, 20)
        plan = plan_transfer(held, wanted, max_bytes=max_bytes)
        sources = {
            name: (whole(name, part)[part.box].clone(), part.box)
            for name, part in held[rank].items()
        }
        targets = {
            name: (torch.zeros(sizes(part.box), dtype=part.dtype), part.box)
            for name, part in wanted[rank].items()
        }
        sent = execute(plan, sources, targets)
        for name, part in wanted[rank].items():
            if not torch.equal(targets[name][0], whole(name, part)[part.box]):
                wrong.append(f"seed {seed}: {name} {part}")
        if sent != missing_bytes(held, wanted):
            wrong.append(f"seed {seed}: {sent} bytes, not {missing_bytes(held, wanted)}")
    return wrong


@pytest.mark.parametrize("world_size, max_bytes", [(2, 60), (3, 1000), (4, 2**20), (4, 60)])
def test_transfer_between_random_layouts_fills_the_targets(world_size: int, max_bytes: int) -> None:
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


def wanted_by_one_rank() -> None:
    move({}, {"w": torch.zeros(3)} if dist.get_rank() == 1 else {})


def test_every_rank_refuses_alike() -> None:
    with pytest.raises(RankError, match="w: no rank holds 3 of the elements that are wanted of it"):
        run_on_ranks(wanted_by_one_rank, 2)
