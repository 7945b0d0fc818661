"""Meshes by name, in fake worlds and on gloo ranks."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from titan_moe.distributed.mesh import Meshes, build_mesh
from titan_moe.distributed.parallel_dims import (
    AXES,
    DENSE_AXES,
    DERIVED_AXES,
    SPARSE_AXES,
    ParallelDims,
)
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.simulate.fake_rank import fake_world

MIXED = {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2, "ep": 2, "etp": 2}
NAMES = (*AXES, *DERIVED_AXES)


def ranks_along(meshes: Meshes, names: tuple[str, ...]) -> list[int]:
    """The ranks that share all other coordinates, by an index into the unflattened world."""
    parts = [part for name in names for part in DERIVED_AXES.get(name, (name,))]
    view = DENSE_AXES if set(parts) <= set(DENSE_AXES) else SPARSE_AXES
    world = torch.arange(32).view([meshes.dims.size(axis) for axis in view])
    place = (world == meshes.rank).nonzero()[0].tolist()
    index = [slice(None) if axis in parts else at for axis, at in zip(view, place, strict=True)]
    return world[tuple(index)].flatten().tolist()


def test_every_axis_is_a_slice_of_the_world() -> None:
    for rank in (0, 13, 31):
        with fake_world(rank, 32):
            meshes = build_mesh(ParallelDims(32, **MIXED), "cpu")
            assert meshes.rank == rank
            for name in NAMES:
                wanted = ranks_along(meshes, (name,))
                assert meshes[name].mesh.tolist() == wanted == list(meshes.members(name))
                assert dist.get_process_group_ranks(meshes[name].get_group()) == wanted
                assert meshes[name].get_coordinate() == (wanted.index(rank),)
                assert meshes[name].size() == meshes.dims.size(name)


@pytest.fixture
def rank_13() -> Iterator[Meshes]:
    with fake_world(13, 32):
        yield build_mesh(ParallelDims(32, **MIXED), "cpu")


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ("dp", "no mesh axis dp: the axes are pp, dp_replicate, dp_shard, cp, tp, edp, ep, etp, "),
        (("ep", "fsdp"), "no view of the mesh has all of ep, fsdp: dense"),
        (("fsdp", "cp"), "fsdp, cp overlap: cp is in two of them"),
        (("tp", "fsdp"), "the axes tp, fsdp stand in the mesh in the order fsdp, tp"),
    ],
)
def test_names_that_no_mesh_has_get_one_line(
    rank_13: Meshes, names: str | tuple[str, ...], says: str
) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        rank_13[names]
    assert "\n" not in str(refused.value)
    if names == "dp":
        assert all(name in str(refused.value) for name in NAMES)


# --- gloo ranks -----------------------------------------------------------------------------------


def describe_groups() -> None:
    meshes = build_mesh(ParallelDims(4, dp_shard=4, ep=2), "cpu")
    assert meshes.group("ep").group_desc == "ep"
    assert meshes.group("edp").group_desc == "edp"
    before = meshes.groups.num_groups
    joined = meshes.group(("ep", "edp"))
    # All ranks share parameters: the world's own group.
    assert joined is dist.group.WORLD is meshes.group("fsdp") is meshes.group(["edp", "ep"])
    assert meshes.group(("ep",)) is meshes.group("ep") is meshes.group(("ep", "etp"))
    assert meshes.groups.num_groups == before == 2

    pairs = build_mesh(ParallelDims(4, pp=2, cp=2, ep=2), "cpu")
    assert pairs.group("ep").group_desc == "cp+ep+sequence"
    before = pairs.groups.num_groups
    assert pairs.group(("pp", "cp")) is dist.group.WORLD
    assert pairs.group("loss").group_desc == "fsdp+loss"
    assert pairs.groups.num_groups == before

    crossed = build_mesh(ParallelDims(4, dp_replicate=2, ep=2), "cpu")
    assert crossed.group(("edp", "ep")) is crossed.group("ep")


def test_groups_are_described_by_their_axes_and_shared() -> None:
    run_on_ranks(describe_groups, 4)


def lay_out_twice() -> tuple[int, int, int]:
    first = build_mesh(ParallelDims(4, tp=2, ep=2), "cpu")
    second = build_mesh(ParallelDims(4, ep=2, etp=2), "cpu", groups=first.groups)
    third = build_mesh(ParallelDims(4, tp=2, ep=2, etp=2), "cpu", groups=first.groups)
    assert second.group("etp") is first.group("tp") is third.group("tp")
    return first.groups.num_groups, second.groups.num_groups, third.groups.num_groups


def test_a_second_layout_uses_the_groups_of_the_first() -> None:
    first, second, third = run_on_ranks(lay_out_twice, 4)[0]
    assert first == second == third
