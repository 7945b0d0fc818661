"""Flex attention's tiles; sinks in low precision."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from tests.support.operations import Operations
from titan_moe.distributed.context_parallel.apply import local_positions
from titan_moe.ops.attention import first_seen_in_sequences, sdpa
from titan_moe.ops.flex_attention import Flex
from titan_moe.ops.local_attention import LocalAttention


@pytest.mark.parametrize("local", [None, ("window", 300), ("chunk", 512)], ids=str)
@pytest.mark.parametrize(("seq_len", "cp", "jumps"), [(1281, 1, 0), (2048, 2, 0), (1000, 5, 1)])
def test_tile_is_seen_if_any_of_its_pairs_is(
    seq_len: int, cp: int, jumps: bool, local: tuple[Any, int] | None
) -> None:
    """Tiles in which positions jump from chunk to chunk may also count as seen by mistake."""
    opens_BS = torch.rand(2, seq_len, generator=torch.Generator().manual_seed(0)) < 5 / seq_len
    layers = local and LocalAttention(*local)
    first_BS = first_seen_in_sequences(opens_BS.cumsum(1), layers, mask_documents=True)
    parts = [local_positions(seq_len, cp, rank, balanced=True) for rank in range(cp)]
    for queries_S, keys_S in product(parts, [torch.arange(seq_len), *parts]):
        with Operations() as seen:
            ours = Flex(compiled=False).block_mask(queries_S, keys_S, first_BS[:, queries_S])
        assert 0 < max(shape.numel() for shape in seen.shapes) <= 4 * seq_len
        theirs = create_block_mask(ours.mask_mod, 2, None, *ours.seq_lengths, device="cpu")
        if jumps:
            assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)
            assert (ours.to_dense() >= theirs.to_dense()).all()
            continue
        for a, b in zip(ours.as_tuple(), theirs.as_tuple(), strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_flex_attention_does_not_use_the_decoding_kernel(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That kernel refuses rows of fewer than 128 queries where many heads share keys."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda f: lambda *_, **options: seen.append(options))
    q, k = (torch.zeros(1, heads, 64, 16, dtype=dtype) for heads in (8, 2))
    flex = Flex(compiled=True)
    flex.attend(q, k, k, flex.sequence_mask(torch.zeros(1, 64, dtype=torch.int64)), 1.0)
    assert seen[0]["kernel_options"]["BACKEND"] == "TRITON"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_do_not_make_attention_less_precise(dtype: torch.dtype) -> None:
    """Errors with them are about those without."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 64, 32), (2, 2, 64, 32), (2, 2, 64, 32), (4,)]
    exact = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    exact = [x.to(dtype).double() for x in exact]
    mask = torch.ones(64, 64, dtype=torch.bool).tril()

    def results(tensors: list[torch.Tensor], *, sinks: bool) -> list[torch.Tensor]:
        q, k, v, sinks_H = (x.detach().requires_grad_() for x in tensors)
        out = sdpa(q, k, v, mask, 0.3, sinks_H if sinks else None)
        return [out, *torch.autograd.grad(out.sum(), [q, k, v, *[sinks_H] * sinks])]

    errors = {}
    for sinks in (False, True):
        ours = results([x.to(dtype) for x in exact], sinks=sinks)
        pairs = zip(ours, results(exact, sinks=sinks), strict=True)
        errors[sinks] = [((a - b).norm() / b.norm()).item() for a, b in pairs]
    for error, without in zip(errors[True], errors[False], strict=False):
        assert error <= 1.5 * without
    assert errors[True][4] <= 2 * max(errors[True][:4])
