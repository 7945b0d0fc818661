"""Private parts of torch's DeviceMesh: each is there, and does what torch itself would do."""

import inspect
import re

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from titan_moe.distributed import torch_mesh
from titan_moe.distributed.parallel_dims import DENSE_AXES, SPARSE_AXES, ParallelDims
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.simulate.fake_rank import fake_world

# Private names that a release of torch may remove, by owner.
ARGUMENTS = {"_init_backend"}
METHODS = {"_unflatten", "_flatten"}
FIELDS = {"_flatten_mapping", "_pg_registry"}
GROUP_NAMES = "_dim_group_names"
"""Attributes that a mesh without groups does not have."""


def test_every_private_name_is_named_here_and_there_in_torch() -> None:
    named = set(re.findall(r"\b_[a-z]\w+", inspect.getsource(torch_mesh)))
    assert named == {*ARGUMENTS, *METHODS, *FIELDS, GROUP_NAMES}
    assert set(inspect.signature(DeviceMesh.__init__).parameters) >= ARGUMENTS
    assert all(callable(getattr(DeviceMesh, name)) for name in METHODS)
    with fake_world(1, 4):
        mesh = torch_mesh.RootMesh("cpu", 4).mesh
        assert set(vars(mesh)) >= FIELDS
        assert not hasattr(mesh._unflatten(0, (2, 2), ("dp", "tp")), GROUP_NAMES)
    assert GROUP_NAMES in inspect.getsource(DeviceMesh.get_group)


def placed(mesh: DeviceMesh) -> tuple:
    return mesh.mesh_dim_names, mesh.mesh.tolist(), mesh.get_coordinate()


def compare_with_torchs_own(degrees: dict[str, int]) -> None:
    dims = ParallelDims(4, **degrees)
    meshes = dims.build_mesh("cpu")
    root = DeviceMesh("cpu", torch.arange(4), mesh_dim_names=("world",), _init_backend=False)
    assert placed(root) == placed(meshes.root.mesh)
    for axes in (DENSE_AXES, SPARSE_AXES):
        view = meshes[axes]
        unflattened = root._unflatten(0, tuple(dims.size(axis) for axis in axes), axes)
        assert placed(unflattened) == placed(view)
        assert view._get_root_mesh() is meshes.root.mesh
        for names in (("pp",), ("dp_replicate", axes[-1]), axes[2:]):
            sliced = DeviceMesh._concatenate([view[name] for name in names])
            assert placed(meshes[names]) == placed(sliced)
            assert meshes[names]._get_root_mesh() is meshes.root.mesh
    if torch.__version__ < "2.13":  # Its layouts differ by their nesting; we never ask for one.
        return
    # Torch takes the mesh that is there, and makes no group.
    flattened = meshes["dp_shard", "cp"]._flatten("fsdp")
    assert flattened is meshes["fsdp"]
    assert flattened.get_group() is meshes.group("fsdp")


@pytest.mark.parametrize(
    "degrees", [{"cp": 2, "ep": 2}, {"pp": 2, "tp": 2, "etp": 2}, {"dp_replicate": 2, "ep": 2}]
)
def test_the_meshes_are_those_that_torch_would_unflatten(degrees: dict[str, int]) -> None:
    run_on_ranks(compare_with_torchs_own, 4, degrees)
