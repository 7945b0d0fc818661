"""Tensors cut by several axes in any order: where parts lie, and checkpoints of every order."""

from itertools import permutations, product
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.ordered import EXPLICIT, explicit, strided
from tests.support.shardings import all_shardings
from titan_moe.checkpoint.checksums import checksums
from titan_moe.checkpoint.tensors import (
    Chunk,
    held_chunks,
    model_tensors,
    read_tensors,
    write_chunks,
)
from titan_moe.distributed.dtensor import (
    check_divides,
    local_part,
    local_slices,
    mesh_axes,
    sharding_of,
)
from titan_moe.distributed.sharding import Sharding, coordinates
from titan_moe.runtime.ranks import run_on_ranks

needs_explicit = pytest.mark.skipif(not EXPLICIT, reason="this torch has no shard_order")


def _whole(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def _mesh(sizes: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=tuple("xyz"[: len(sizes)]))


def _each_way(whole: Tensor, mesh: DeviceMesh) -> dict[str, DTensor]:
    """The tensor under every sharding, its order said in every way that torch has for it."""
    made = {}
    for sharding in all_shardings(list(mesh_axes(mesh)), whole.ndim):
        if sharding.partial:
            continue
        within = strided(whole, sharding, mesh)
        if EXPLICIT and any(isinstance(each, _StridedShard) for each in within.placements):
            made[f"{sharding} beside"] = explicit(whole, sharding, mesh)
        try:
            sharding_of(within)
        except ValueError:  # A strided shard of a dim that does not divide.
            continue
        made[str(sharding)] = within
    return made


def _write(tensors: dict[str, Tensor], folder: Path) -> None:
    def local(chunk: Chunk) -> Tensor:
        return local_part(tensors[chunk.name])

    write_chunks(folder, held_chunks(tensors), local, doing="saving")


def _save_and_load(
    sizes: tuple[int, ...], shape: tuple[int, ...], distances: list[int], folder: Path
) -> tuple[int, list[str]]:
    """How many tensors were saved, and which loads gave other bits. `distances`: how much further
    in the list of shardings each tensor is loaded."""
    whole, mesh = _whole(shape), _mesh(sizes)
    saved = _each_way(whole, mesh)
    _write(dict(saved), folder)
    wrong = []
    names = list(saved)
    for distance in distances or range(len(names)):
        targets = [names[(i + distance) % len(names)] for i in range(len(names))]
        loaded: dict[str, Tensor] = {
            name: type(saved[target])(
                torch.zeros_like(local_part(saved[target])),
                saved[target]._spec,
                requires_grad=False,
            )
            for name, target in zip(names, targets, strict=True)
        }
        read_tensors(loaded, folder)
        for (name, tensor), target in zip(loaded.items(), targets, strict=True):
            if not torch.equal(local_part(tensor), local_part(saved[target])):
                wrong.append(f"{name} -> {target}")
    plain: dict[str, Tensor] = {name: torch.zeros_like(whole) for name in names}
    read_tensors(plain, folder)
    wrong += [
        f"{name} -> plain" for name, tensor in plain.items() if not torch.equal(tensor, whole)
    ]
    if checksums(dict(saved)) != checksums(plain):
        wrong.append("checksums")
    return len(names), wrong


# 11 shardings of a matrix over two axes, 49 over three. Those with a strided shard, 2 and 22, are
# also said beside the placements, and only there where they do not divide.
@pytest.mark.parametrize(("shape", "number"), [((8, 4), 11), ((5, 3), 9)])
def test_every_order_of_two_axes_loads_under_every_other(
    tmp_path: Path, shape: tuple[int, int], number: int
) -> None:
    for saved, wrong in run_on_ranks(_save_and_load, 4, (2, 2), shape, [], tmp_path):
        assert wrong == []
        assert saved == number + 2 * EXPLICIT


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "number"), [((16, 8), 49), ((7, 9), 27)])
def test_orders_of_three_axes_load_under_others(
    tmp_path: Path, shape: tuple[int, int], number: int
) -> None:
    distances = [1, 7, 20, 40]
    for saved, wrong in run_on_ranks(_save_and_load, 8, (2, 2, 2), shape, distances, tmp_path):
        assert wrong == []
        assert saved == number + 22 * EXPLICIT


# --- an explicit `shard_order` --------------------------------------------------------------------


class _Buffers(nn.Module):
    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.register_buffer("kept", tensor)


def _in_explicit_order(folder: Path) -> dict[str, bool]:
    """Rows 0-1, 4-5, 2-3 and 6-7 on ranks 0 to 3, which torch's own checkpoint takes for 0-1, 2-3,
    4-5 and 6-7."""
    whole, mesh = _whole((8, 2)), _mesh((2, 2))
    kept = explicit(whole, Sharding.parse("S(0)[y,x]"), mesh)
    first = [0, 4, 2, 6][dist.get_rank()]
    tensors = model_tensors([_Buffers(kept)])
    _write(tensors, folder)
    plain = {"model.kept": torch.zeros_like(whole)}
    read_tensors(plain, folder)
    local_part(tensors["model.kept"]).zero_()
    read_tensors(tensors, folder)
    return {
        "sharding": str(sharding_of(kept)[0]) == "S(0)[y,x]",
        "slices": local_slices(kept) == (slice(first, first + 2), slice(0, 2)),
        "saved": torch.equal(plain["model.kept"], whole),
        "loaded": torch.equal(local_part(kept), whole[first : first + 2]),
    }


@needs_explicit
def test_an_explicit_order_is_honoured(tmp_path: Path) -> None:
    for found in run_on_ranks(_in_explicit_order, 4, tmp_path):
        assert found == dict.fromkeys(("sharding", "slices", "saved", "loaded"), True)


@pytest.mark.parametrize("sizes", [(3, 2), (4, 2), (2, 2, 2), (2, 3, 2), (3, 2, 2)])
def test_strided_shards_that_are_not_refused_lie_where_torch_says(sizes: tuple[int, ...]) -> None:
    axes = dict(zip("xyz", sizes, strict=False))
    refused = 0
    for order, size in product(permutations(axes), range(1, 26)):
        sharding = Sharding((order,))
        placements = sharding.placements(axes)
        try:
            check_divides(sharding, axes, placements, (size,))
        except ValueError:
            refused += 1
            continue
        for rank in range(prod(sizes)):
            place = coordinates(rank, axes)
            (length,), (begin,) = _compute_local_shape_and_global_offset(
                (size,), sizes, [place[axis] for axis in axes], placements
            )
            (box,) = sharding.box(rank, (size,), axes)
            assert length == box.stop - box.start
            assert length == 0 or begin == box.start, (str(sharding), size, rank)
    assert refused
