"""Which tensor dim FSDP cuts, and how many reductions are under way."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from titan_moe.distributed import fsdp
from titan_moe.distributed.fsdp import shard_dim


@pytest.mark.parametrize(
    "shape, num_shards, expected",
    [
        ((8, 64, 32), 4, 0),  # divides
        ((8, 64, 32), 8, 0),
        ((2, 64, 32), 4, 1),  # dim 0 would leave ranks empty
        ((2, 63, 32), 4, 2),
        ((2, 63, 31), 4, 0),  # nothing divides: empty shards are legal
        ((10, 64), 4, 0),  # uneven (3, 3, 3, 1), none empty
        ((9, 64), 8, 1),  # chunks of 2 leave three ranks empty
        ((7,), 8, 0),
    ],
)
def test_no_rank_is_empty_where_another_dim_divides(shape, num_shards, expected):
    dim = shard_dim(torch.Size(shape), num_shards)
    assert dim == expected
    chunks = torch.empty(shape).chunk(num_shards, dim)
    empty = len(chunks) < num_shards
    assert not empty or not any(size % num_shards == 0 for size in shape)


_CALL = "set_reduce_scatter_max_input_buffers"


@pytest.mark.parametrize("has_the_call", [True, False])
def test_two_reductions_where_torch_has_the_call(
    monkeypatch: pytest.MonkeyPatch, has_the_call: bool
) -> None:
    asked = []
    monkeypatch.delattr(FSDPModule, _CALL, raising=False)
    if has_the_call:
        monkeypatch.setattr(FSDPModule, _CALL, lambda *args: asked.append(args), raising=False)
    root = torch.nn.Module()
    fsdp.keep_two_reductions(root)
    assert asked == ([(root, 2)] if has_the_call else [])


@pytest.mark.parametrize(
    "device_type, tp, expected", [("cuda", 2, 1), ("cpu", 2, 0), ("cuda", 1, 0)]
)
def test_two_reductions_on_gpus_with_experts_apart(
    monkeypatch: pytest.MonkeyPatch, device_type: str, tp: int, expected: int
) -> None:
    asked: list[torch.nn.Module] = []
    mesh = SimpleNamespace(device_type=device_type)
    monkeypatch.setattr(fsdp, "_data_mesh", lambda *args: mesh)
    monkeypatch.setattr(fsdp, "_shard", lambda *args, **options: None)
    monkeypatch.setattr(fsdp, "keep_two_reductions", asked.append)
    dims = SimpleNamespace(tp=tp, ep=1, etp=1, world_size=2)
    root, unit, wide = torch.nn.Module(), torch.nn.Module(), torch.float32
    policy = fsdp.ShardingPolicy(wide, wide, wide, True, True, False)
    fsdp.apply_fsdp(root, [[unit]], SimpleNamespace(dims=dims), policy)
    assert asked == [root] * expected
