"""This rank's part of a tensor that may be sharded."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_part(tensor: Tensor) -> Tensor:
    """The part this rank holds, sharing memory; a plain tensor is held whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Where this rank's part lies in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))


def cut_parameter(module: nn.Module, name: str, mesh: DeviceMesh, dims: Sequence[int]) -> None:
    """Replace a parameter, on the meta device, by a DTensor of this rank's part.

    Args:
        dims: the tensor dim that each of the mesh's axes cuts; each size divides evenly.
    """
    whole = module.get_parameter(name).detach()
    local = whole
    for dim, degree in zip(dims, mesh.shape, strict=True):
        local = local.narrow(dim, 0, local.shape[dim] // degree)
    shards = [Shard(dim) for dim in dims]
    sharded = DTensor.from_local(local.contiguous(), mesh, shards, run_check=False)
    assert sharded.shape == whole.shape, f"{name} {tuple(whole.shape)} does not divide by {mesh}"
    module.register_parameter(name, nn.Parameter(sharded))
