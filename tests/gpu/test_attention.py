"""Flex attention on CUDA, forward and backward, against the explicit mask."""

import pytest
import torch

from titan_moe.models.layers.attention_core import DocumentFlex, DocumentSdpa

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_flex_matches_the_explicit_mask_forward_and_backward():
    documents_BS = torch.randint(0, 2, (2, 512), device="cuda").cumsum(1).int() // 40
    results = []
    for core in (DocumentSdpa(), DocumentFlex(compiled=True)):
        generator = torch.Generator("cuda").manual_seed(0)
        q, k, v = (
            torch.randn(2, heads, 512, 64, device="cuda", generator=generator, requires_grad=True)
            for heads in (8, 2, 2)
        )
        out = core(q, k, v, core.mask(documents_BS), 0.1)
        results.append([out, *torch.autograd.grad(out.square().sum(), [q, k, v])])
    for ours, oracle in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, oracle, rtol=1e-2, atol=1e-2)
