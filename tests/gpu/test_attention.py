"""Flex attention on CUDA, forward and backward, against the explicit mask."""

import pytest
import torch

from titan_moe.distributed.block_attention import ExplicitBlocks, FlexBlocks, Upstream
from titan_moe.models.layers.attention_core import DocumentSdpa, FlexCore

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_flex_matches_the_explicit_mask_forward_and_backward():
    documents_BS = torch.randint(0, 2, (2, 512), device="cuda").cumsum(1).int() // 40
    results = []
    for core in (DocumentSdpa(), FlexCore(mask_documents=True, compiled=True)):
        generator = torch.Generator("cuda").manual_seed(0)
        q, k, v = (
            torch.randn(2, heads, 512, 64, device="cuda", generator=generator, requires_grad=True)
            for heads in (8, 2, 2)
        )
        out = core(q, k, v, core.mask(documents_BS), 0.1)
        results.append([out, *torch.autograd.grad(out.square().sum(), [q, k, v])])
    for ours, oracle in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, oracle, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("keys_of", ["own half", "other half"])
def test_blocks_by_flex_match_explicit_masks_forward_and_backward(keys_of: str):
    """What a rank of two computes in a step of the ring; some queries see no key of the block."""
    documents_BS = torch.randint(0, 2, (2, 512), device="cuda").cumsum(1).int() // 40
    first, second = torch.arange(512).chunk(2)
    keys_S = second if keys_of == "own half" else first
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(heads: int) -> torch.Tensor:
        return torch.randn(2, heads, 256, 64, device="cuda", generator=generator)

    q, k, v, grad = drawn(8), drawn(2), drawn(2), drawn(8)
    results = []
    for blocks in (
        ExplicitBlocks(mask_documents=True),
        FlexBlocks(mask_documents=True, compiled=True),
    ):
        found = torch.zeros_like(q), torch.full(q.shape[:3], float("-inf"), device="cuda")
        grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        upstream = Upstream(q, grad, torch.full(q.shape[:3], 3.0, device="cuda"), q[..., 0])
        for queries, keys, mask in blocks.blocks(documents_BS, second, keys_S):
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
