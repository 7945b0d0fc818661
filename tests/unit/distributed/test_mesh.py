"""Degrees, coordinates and groups by arithmetic; meshes by name, in fake worlds and on ranks."""

from contextlib import suppress
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.checking import job_of
from titan_moe.distributed.dtensor import cut_parameter, local_part, sharding_of
from titan_moe.distributed.parallel_dims import (
    AXES,
    DENSE_AXES,
    DERIVED_AXES,
    SPARSE_AXES,
    ParallelDims,
)
from titan_moe.models.hf import model_of_job
from titan_moe.parallelize.parallelize import lay_out
from titan_moe.parallelize.policies import make_plan
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.simulate.fake_rank import fake_world

MIXED = {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2, "ep": 2, "etp": 2}
NAMES = (*AXES, *DERIVED_AXES)


POWERS = (1, 2, 4, 8)


def legal_layouts(world_size: int) -> list[ParallelDims]:
    layouts = []
    for degrees in product(POWERS, repeat=7):
        with suppress(ValueError):
            layouts.append(ParallelDims(world_size, *degrees))
    return layouts


def test_coordinates_and_groups_are_those_of_the_unflattened_world():
    for dims in legal_layouts(8):
        for view in (DENSE_AXES, SPARSE_AXES):
            world = torch.arange(8).view([dims.size(axis) for axis in view])
            for rank in range(8):
                place = [int(i) for i in (world == rank).nonzero()[0]]
                assert [dims.coordinate(rank, axis) for axis in view] == place
                for name in (*view, *DERIVED_AXES):
                    joined = DERIVED_AXES.get(name, (name,))
                    if set(joined) <= set(view):
                        zipped = zip(view, place, strict=True)
                        index = tuple(slice(None) if a in joined else at for a, at in zipped)
                        assert dims.group_of(rank, name) == tuple(world[index].flatten().tolist())


def test_dp_shard_minus_one_is_the_rest():
    assert ParallelDims(24, tp=2, pp=3).dp_shard == 4


@pytest.mark.parametrize("degrees", [{"tp": 3}, {"ep": 3}, {"ep": 8, "dp_replicate": 2}, {"pp": 0}])
def test_degrees_that_do_not_multiply_up_are_refused(degrees: dict[str, int]):
    with pytest.raises(ValueError, match=r"\d"):
        ParallelDims(8, **{"dp_shard": -1, **degrees})


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ("dp", "no mesh axis dp: the axes are pp, dp_replicate, dp_shard, cp, tp, edp, ep, etp, "),
        (("ep", "fsdp"), "no view of the mesh has all of ep, fsdp: dense"),
        (("fsdp", "cp"), "fsdp, cp overlap: cp is in two of them"),
        (("tp", "fsdp"), "the axes tp, fsdp stand in the mesh in the order fsdp, tp"),
    ],
)
def test_names_that_no_mesh_has_get_one_line(names: str | tuple[str, ...], says: str) -> None:
    with fake_world(13, 32):
        meshes = ParallelDims(32, **MIXED).build_mesh("cpu")
        with pytest.raises(ValueError, match=says) as refused:
            meshes[names]
    assert "\n" not in str(refused.value)
    if names == "dp":
        assert all(name in str(refused.value) for name in NAMES)


def placed(num_experts: int, replicas: int, words: str) -> dict[str, str]:
    """Placements of attention and experts with dp_shard 4, tp 2 and ep 2."""
    words += " ep 2 tp 2 --p.data_parallel_shard_degree 4 --model.name qwen3 "
    words += f"--model.flavor debugmodel_moe --p.data_parallel_replicate_degree {replicas}"
    job = job_of(words)
    plain = model_of_job(job.model)
    assert plain.moe is not None
    plain = replace(plain, moe=replace(plain.moe, num_experts=num_experts, top_k=2))
    with fake_world(3, 8 * replicas):
        plan = make_plan(job, plain, 8 * replicas)
        parts = lay_out(plan, plan.dims.build_mesh(plan.device_type)).parts
        named = [x for x in parts[0].named_parameters() if x[0].startswith("layers.1.")]
        found = {}
        for name, parameter in named:
            axes = ", ".join(f"{axis}={size}" for axis, size in sharding_of(parameter)[1].items())
            found[name] = f"{parameter.placements} on {axes}"
    names = ("attention.wq.weight", "attention.wo.weight", "moe.experts.w1", "moe.experts.w2")
    return {name: found[f"layers.1.{name}"] for name in names}


ETP = "--p.expert_tensor_parallel_degree 2"
CUT, ONE = "_StridedShard(dim=0, sf=2), Shard(dim=0)", "Shard(dim=1), Shard(dim=0)"


@pytest.mark.parametrize(
    ("num_experts", "words", "w1", "w2"),
    [
        (8, "", CUT, CUT),
        (4, "", ONE, ONE),  # Fewer than ranks of edp x ep: another dim divides evenly.
        (4, ETP, f"{CUT}, Shard(dim=1)", f"{CUT}, Shard(dim=2)"),
        (2, ETP, f"{CUT.replace('0, ', '1, ')}, Shard(dim=1)", f"{ONE}, Shard(dim=2)"),
    ],
)
def test_placements_are_those_that_the_design_of_expert_parallelism_published(
    num_experts: int, words: str, w1: str, w2: str
) -> None:
    """The design names dp_shard_cp what is fsdp here, and dp_shard_mod_ep what is edp
    (github.com/pytorch/torchtitan, pull requests 732, 1561 and 3568)."""
    mesh = "edp=2, ep=2, etp=2" if words else "edp=4, ep=2"
    published = {
        "attention.wq.weight": (CUT, "fsdp=4, tp=2"),
        "attention.wo.weight": ("Shard(dim=0), Shard(dim=1)", "fsdp=4, tp=2"),
        "moe.experts.w1": (w1, mesh),
        "moe.experts.w2": (w2, mesh),
    }
    for replicas, first, axis in ((1, "", ""), (2, "Replicate(), ", "dp_replicate=2, ")):
        assert placed(num_experts, replicas, words) == {
            name: f"({first}{how}) on {axis}{axes}" for name, (how, axes) in published.items()
        }


@pytest.mark.parametrize(
    ("shape", "dims"), [((2, 8, 4), (0, 1)), ((2, 8), (0, 1)), ((1, 8), (None, 1))]
)
def test_a_part_with_a_dim_of_size_1_is_that_of_a_contiguous_parameter(
    shape: tuple[int, ...], dims: tuple[int | None, int]
) -> None:
    """Experts and their biases where each rank has one expert, and an adapter of rank 1. FSDP
    refuses a parameter that is not contiguous."""
    with fake_world(1, 4):
        mesh = ParallelDims(4, ep=2, etp=2).build_mesh("cpu")["ep", "etp"]
        module = nn.Module()
        module.weight = nn.Parameter(torch.empty(shape, device="meta"))
        cut_parameter(module, "weight", mesh, dims)
        for part in (module.weight, local_part(module.weight)):
            assert part.stride() == torch.empty(part.shape, device="meta").stride()


# --- gloo ranks -----------------------------------------------------------------------------------


def describe_groups() -> None:
    meshes = ParallelDims(4, dp_shard=4, ep=2).build_mesh("cpu")
    assert meshes.group("ep").group_desc == "ep"
    assert meshes.group("edp").group_desc == "edp"
    before = meshes.groups.num_groups
    joined = meshes.group(("ep", "edp"))
    # All ranks share parameters: the world's own group.
    assert joined is dist.group.WORLD is meshes.group("fsdp") is meshes.group(["edp", "ep"])
    assert meshes.group(("ep",)) is meshes.group("ep") is meshes.group(("ep", "etp"))
    assert meshes.groups.num_groups == before == 2

    pairs = ParallelDims(4, pp=2, cp=2, ep=2).build_mesh("cpu")
    assert pairs.group("ep").group_desc == "cp+ep+sequence"
    before = pairs.groups.num_groups
    assert pairs.group(("pp", "cp")) is dist.group.WORLD
    assert pairs.group("loss").group_desc == "fsdp+loss"
    assert pairs.groups.num_groups == before

    crossed = ParallelDims(4, dp_replicate=2, ep=2).build_mesh("cpu")
    assert crossed.group(("edp", "ep")) is crossed.group("ep")

    # Another layout uses the groups of the first.
    first = ParallelDims(4, tp=2, ep=2).build_mesh("cpu")
    second = ParallelDims(4, ep=2, etp=2).build_mesh("cpu", groups=first.groups)
    third = ParallelDims(4, tp=2, ep=2, etp=2).build_mesh("cpu", groups=first.groups)
    assert second.group("etp") is first.group("tp") is third.group("tp")
    assert first.groups.num_groups == second.groups.num_groups == third.groups.num_groups


def test_groups_are_described_by_their_axes_and_shared_by_layouts() -> None:
    run_on_ranks(describe_groups, 4)
