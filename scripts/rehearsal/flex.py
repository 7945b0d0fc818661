"""Flex attention where CUDA still has it: its kernels for sm_90, forward and backward.

A row cut over ranks attends by it in a ring, and a model in float32, for which torch's flash
attention has no kernel, attends by it as a whole. Heads are those of the shipped GPU files.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from scripts.rehearsal.cases import shipped_cases
from scripts.rehearsal.fake_cuda import CUDA
from scripts.rehearsal.places import Place
from titan_moe.distributed.context_parallel.blocks import Upstream, choose_blocks
from titan_moe.ops.attention import choose_core

_BATCH, _SEQ_LEN = 1, 4096
PLACE = Place("ops/attention.py:attend", 0)


class Heads(NamedTuple):
    """Of an attention."""

    queries: int
    keys: int
    qk_dim: int
    v_dim: int


def flex_cases(word: str = "") -> dict[str, tuple[Callable[[], None], Place]]:
    """What `kernels_of` takes, for each kind of heads in a ring and as a whole, by name."""
    shapes: dict[tuple[int, int], Heads] = {}
    for case in shipped_cases():
        a = case.config.attention
        heads = Heads(a.num_heads, a.num_kv_heads, a.qk_dim, a.v_dim)
        # Tiles are chosen by dims alone, so of their models the first will do.
        shapes.setdefault((heads.qk_dim, heads.v_dim), heads)
    cases: dict[str, tuple[Callable[[], None], Place]] = {}
    for heads in shapes.values():
        name = f"flex heads of {heads.qk_dim}/{heads.v_dim}"
        cases[f"{name} in a ring, bfloat16"] = partial(attend_in_ring, heads), PLACE
        cases[f"{name}, float32"] = partial(attend_in_float32, heads), PLACE
    return {name: case for name, case in cases.items() if word in name}


def attend_in_ring(heads: Heads) -> None:
    """One block of the ring, forward and backward, on fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = _inputs(heads, torch.bfloat16)
        attention = choose_blocks(mask_documents=True, device_type="cuda")
        positions_S = torch.arange(_SEQ_LEN, device=CUDA)
        [block] = attention.blocks(_documents(), positions_S, positions_S)
        o, lse = attention.forward(q, k, v, block.mask, heads.qk_dim**-0.5)
        attention.backward(Upstream(q, o, lse, lse), k, v, block.mask, heads.qk_dim**-0.5)


def attend_in_float32(heads: Heads) -> None:
    """Whole rows, forward and backward, on fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (x.requires_grad_() for x in _inputs(heads, torch.float32))
        core = choose_core(mask_documents=True, device_type="cuda")
        core(q, k, v, core.mask(_documents()), heads.qk_dim**-0.5).sum().backward()


def _inputs(heads: Heads, dtype: torch.dtype) -> list[Tensor]:
    """As projections leave them: tokens before heads in memory."""
    shapes = (heads.queries, heads.qk_dim), (heads.keys, heads.qk_dim), (heads.keys, heads.v_dim)
    return [
        torch.empty(_BATCH, _SEQ_LEN, *shape, dtype=dtype, device=CUDA).transpose(1, 2)
        for shape in shapes
    ]


def _documents() -> Tensor:
    return torch.zeros(_BATCH, _SEQ_LEN, dtype=torch.int64, device=CUDA)
