"""One MoE layer keeps no tensor of its routed rows twice for the backward, by storage."""

from collections import Counter

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from titan_moe.models.feed_forward import FeedForward
from titan_moe.moe.config import DispatchOptions, MoEConfig
from titan_moe.moe.layer import MoE
from titan_moe.ops.activation import CLAMPED_SWIGLU, Activation
from titan_moe.runtime.ranks import run_on_ranks

ROWS, SEQ_LEN, D, HIDDEN, SHARED, EXPERTS, TOP_K = 2, 30, 16, 8, 24, 4, 2
LATENT = 12
TOKENS = ROWS * SEQ_LEN


def kept(ep: int, settings: dict) -> tuple[Counter, int]:
    """Returns the number of floating-point storages by size, and this rank's number of rows."""
    from titan_moe.distributed.expert_parallel import apply_expert_parallel
    from titan_moe.distributed.parallel_dims import ParallelDims

    torch.manual_seed(0)
    layer = MoE(D, MoEConfig(EXPERTS, TOP_K, HIDDEN, **settings), FeedForward(D, SHARED))
    for parameter in layer.parameters():
        parameter.data.normal_()
    if ep > 1:
        meshes = ParallelDims(world_size=ep, ep=ep).build_mesh("cpu")
        apply_expert_parallel([layer], meshes, DispatchOptions())
    x_BSD = torch.randn(ROWS, SEQ_LEN, D, requires_grad=True)
    found: dict[int, tuple] = {}
    ours = {p.untyped_storage().data_ptr() for p in layer.parameters()} if ep == 1 else set()
    num_rows = []
    layer.experts.compute.register_forward_pre_hook(
        lambda _, args: num_rows.append(len(args[0].x_RD))
    )

    def pack(x):
        storage = x.untyped_storage()
        if x.is_floating_point() and x.ndim == 2 and storage.data_ptr() not in ours:
            found[storage.data_ptr()] = x, storage.nbytes() // 4
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        y = layer(x_BSD)
    y.sum().backward()
    (rows,) = num_rows
    # All are alive until here: no two had one address.
    sizes = Counter(size for _, size in found.values())
    return Counter({size: n for size, n in sizes.items() if size >= rows * HIDDEN}), rows


SETTINGS = {
    "swiglu": {},
    "weighted inputs": {"weights_scale": "inputs"},
    "gpt-oss": {"activation": CLAMPED_SWIGLU, "projection_bias": True},
    "not gated": {"activation": Activation("relu2", gated=False)},
    "not gated, weighted inputs": {
        "activation": Activation("relu2", gated=False),
        "weights_scale": "inputs",
    },
    "padded": {"row_alignment": 16},
    "latent": {"latent_dim": LATENT},
}


def expected(rows: int, first: int, dim: int) -> Counter:
    """Returns the number of storages by elements: x, gate and up of routed rows, once each; never
    y, hidden rows or weighted rows. With rows of a latent, their sum too. `first`: 2, or 1 where
    there is no up."""
    found = Counter({rows * dim: 1, rows * HIDDEN: first})
    if dim != D:
        found += Counter({TOKENS * dim: 1})
    # The layer's input, which router and shared experts read, and what the latter keep.
    found += Counter({TOKENS * D: 1, TOKENS * SHARED: 4})
    return found


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("ep", [1, 2])
def test_backward_keeps_x_gate_and_up_of_each_routed_row_once(ep: int, name: str):
    arguments = ep, SETTINGS[name]
    for sizes, rows in [kept(*arguments)] if ep == 1 else run_on_ranks(kept, ep, *arguments):
        dim = SETTINGS[name].get("latent_dim", D)
        wanted = expected(rows, 1 if "not gated" in name else 2, dim)
        assert sizes == Counter({n: c for n, c in wanted.items() if n >= rows * HIDDEN}), rows
