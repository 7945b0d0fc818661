"""Flex and flash attention on CUDA, forward and backward, against explicit masks."""

import pytest
import torch
from torch import Tensor

from tests.support.operations import without_waits
from titan_moe.distributed.context_parallel.blocks import ExplicitBlocks, FlexBlocks, Upstream
from titan_moe.ops import attention, flex_attention
from titan_moe.ops.attention import AttentionCore, FlexCore, Sdpa, VarlenCore
from titan_moe.ops.local_attention import LocalAttention
from titan_moe.ops.sparse_attention import Index, SparseAttention
from titan_moe.ops.varlen_attention import DocumentBounds, bounds_of

DEVICE = "cuda"
LOCALS = {
    "all": None,
    "window": LocalAttention("window", 100),
    "narrow window": LocalAttention("window", 3),
    "chunk": LocalAttention("chunk", 128),
}


def _drawn(*heads: int, seq_len: int = 512) -> list[Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    return [torch.randn(2, h, seq_len, 64, device=DEVICE, generator=generator) for h in heads]


def _documents() -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(0)
    steps = torch.randint(0, 2, (2, 512), device=DEVICE, generator=generator)
    return steps.cumsum(1).int() // 40


def _results(core: AttentionCore, local: str, *, sinks: bool, seq_len: int = 512) -> list[Tensor]:
    """Returns output and gradients."""
    inputs = [x.requires_grad_() for x in _drawn(8, 2, 2, seq_len=seq_len)]
    sinks_H = torch.linspace(-1, 3, 8, device=DEVICE, requires_grad=True)
    inputs += [sinks_H] * sinks
    q, k, v, *rest = inputs
    out = core(q, k, v, core.mask(_documents()[:, :seq_len], LOCALS[local]), 0.1, *rest)
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("masked", [True, False])
def test_flex_matches_the_explicit_mask_forward_and_backward(masked: bool, local: str, sinks: bool):
    plain = Sdpa(mask_documents=masked)
    ours = FlexCore(mask_documents=masked, compiled=True)
    oracle = _results(plain, local, sinks=sinks)
    for a, b in zip(_results(ours, local, sinks=sinks), oracle, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("seq_len", [1, 64, 100])
def test_flex_takes_rows_shorter_than_a_tile_whose_heads_share_keys(seq_len: int):
    cores = Sdpa(mask_documents=True), FlexCore(mask_documents=True, compiled=True)
    oracle, ours = (_results(core, "all", sinks=False, seq_len=seq_len) for core in cores)
    for a, b in zip(ours, oracle, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dims", [(8, 8), (12, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_heads_that_no_fused_kernel_takes_match_the_cpu(
    dtype: torch.dtype, dims: tuple[int, int], sinks: bool
):
    """The gate's heads and type."""
    assert not flex_attention.takes(*dims, dtype)
    core, documents_BS = Sdpa(mask_documents=True), _documents()
    shapes = [(2, 8, 512, dims[0]), (2, 2, 512, dims[0]), (2, 2, 512, dims[1]), (8,)]
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(s, dtype=dtype, generator=generator) for s in shapes[: 3 + sinks]]

    def results(device: str) -> list[Tensor]:
        q, k, v, *rest = inputs = [x.to(device).requires_grad_() for x in drawn]
        out = core(q, k, v, core.mask(documents_BS.to(device)), 0.3, *rest)
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    bound = 1e-3 if dtype is torch.float32 else 1e-12
    for ours, oracle in zip(results(DEVICE), results("cpu"), strict=True):
        assert (ours.cpu() - oracle).norm() <= bound * oracle.norm()


@pytest.mark.parametrize("heads", ["gqa", "latent"])
@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("masked", [True, False])
def test_flash_matches_the_explicit_mask_forward_and_backward(masked: bool, local: str, heads: str):
    """bfloat16 is compared with float32. The bounds leave room, so some pieces are empty."""
    core = VarlenCore(mask_documents=masked)
    plain = Sdpa(mask_documents=masked)
    kv_heads, dims = (2, (128, 128, 128)) if heads == "gqa" else (8, (192, 192, 128))
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = [(2, h, 512, d) for h, d in zip((8, kv_heads, kv_heads), dims, strict=True)]
    drawn = [torch.randn(s, device=DEVICE, generator=generator).bfloat16() for s in shapes]
    documents_BS = _documents()
    per_sequence, longest = bounds_of(documents_BS)
    spare = DocumentBounds(per_sequence + 3, longest)

    def results(core: AttentionCore, bounds: DocumentBounds | None, dtype: torch.dtype):
        q, k, v = inputs = [x.to(dtype).requires_grad_() for x in drawn]
        out = core(q, k, v, core.mask(documents_BS, LOCALS[local], bounds), 0.1)
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    oracle = results(plain, None, torch.float32)
    for bounds in (None, spare):
        for ours, wanted in zip(results(core, bounds, torch.bfloat16), oracle, strict=True):
            assert (ours - wanted).norm() <= 2e-2 * wanted.norm()


def test_flash_never_waits_for_the_device():
    core = VarlenCore(mask_documents=True)
    documents_BS = _documents()
    bounds = bounds_of(documents_BS)
    q, k, v = (x.bfloat16().requires_grad_() for x in _drawn(8, 2, 2))
    with without_waits():
        out = core(q, k, v, core.mask(documents_BS, LOCALS["chunk"], bounds), 0.1)
        out.sum().backward()


@pytest.mark.parametrize("local", ["all", "window", "narrow window"])
@pytest.mark.parametrize("keys_of", ["own half", "other half"])
def test_blocks_by_flex_match_explicit_masks_forward_and_backward(keys_of: str, local: str):
    """A rank of two computes this in a step of the ring; some queries see no key of the block."""
    first, second = torch.arange(512, device=DEVICE).chunk(2)
    keys_S = second if keys_of == "own half" else first
    q, k, v, grad = _drawn(8, 2, 2, 8, seq_len=256)
    results = []
    seen_from = attention.first_seen_in_sequences
    first_BS = seen_from(_documents(), LOCALS[local], mask_documents=True)
    for blocks in (ExplicitBlocks(), FlexBlocks(compiled=True)):
        found = torch.zeros_like(q), torch.full(q.shape[:3], float("-inf"), device=DEVICE)
        grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        upstream = Upstream(q, grad, torch.full(q.shape[:3], 3.0, device=DEVICE), q[..., 0])
        for queries, keys, mask in blocks.blocks(first_BS, second, keys_S):
            at = k[:, :, keys], v[:, :, keys], mask, 0.1
            parts = blocks.forward(q[:, :, queries], *at)
            for whole, part in zip(found, parts, strict=True):
                whole[:, :, queries] = part
            terms = blocks.backward(upstream.of(queries), *at)
            for whole, term, where in zip(grads, terms, (queries, keys, keys), strict=True):
                whole[:, :, where] += term
        results.append([*found, *grads])
    for ours, oracle in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, oracle, rtol=1e-2, atol=1e-2)


def test_sparse_attention_in_bfloat16_matches_float32():
    """All keys: of a few, rounding selects others."""
    drawn = [x.bfloat16() for x in _drawn(4, 4, 4, 2, 1)]
    core, documents_BS = SparseAttention(mask_documents=True), _documents()

    def results(dtype: torch.dtype) -> list[Tensor]:
        q, k, v, index_q, index_k = inputs = [x.to(dtype).requires_grad_() for x in drawn]
        own = index_q.transpose(1, 2), index_k[:, 0], index_q[:, :, :, 0].mT.float() / 8
        losses: list[Tensor] = []

        def add_loss(o_BHSC: Tensor, loss: Tensor) -> Tensor:
            losses.append(loss)
            return o_BHSC

        index = Index(*own, None, lambda choose, scores: choose(scores), add_loss)
        out = core(q, k, v, core.mask(documents_BS), 0.1, None, index)
        gradients = torch.autograd.grad(out.float().square().sum(), inputs)
        return [out, *losses, *gradients]

    for a, b in zip(results(torch.bfloat16), results(torch.float32), strict=True):
        assert (a.float() - b).norm() <= 2e-2 * b.norm()
