"""Sparse attention and its indexer's loss against formulas of all pairs, in float64."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from titan_moe.moe.balance import attach_loss
from titan_moe.ops.sparse_attention import (
    Index,
    SparseAttention,
    index_scores,
    pack_keys,
    select_keys,
    unpack_keys,
)
from titan_moe.verify.gradients.cores import SelectedPairs

ROWS, LENGTH, HEADS, INDEX_HEADS = 2, 23, 3, 4
DOCUMENTS_BS = torch.tensor([[0] * 9 + [1] * 14, [0] + [1] * 2 + [2] * 20])
Tensors = list[Tensor]


def drawn(seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensors:
    """q, k and v of attention; q, k and the weights of the indexer."""
    generator = torch.Generator().manual_seed(seed)
    attention = [(ROWS, HEADS, LENGTH, width) for width in (6, 6, 5)]
    indexer = [(ROWS, LENGTH, INDEX_HEADS, 8), (ROWS, LENGTH, 8), (ROWS, LENGTH, INDEX_HEADS)]
    shapes = [*attention, *indexer]
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.to(dtype).requires_grad_() for x in drawn]


def run(
    core: SparseAttention | SelectedPairs,
    tensors: Tensors,
    top_k: int | None,
    counted_BS: Tensor | None = None,
) -> Tensors:
    """The output, the loss of the queries that count, and the gradients of both together."""
    total = torch.zeros((), dtype=torch.float64)
    count = partial(attach_loss, total=total) if isinstance(core, SparseAttention) else None
    q, k, v, *own = tensors
    index = Index(*own, top_k, partial(select_keys, top_k=top_k), count, counted_BS)
    mask = core.mask(DOCUMENTS_BS)
    o_BHSC = core(q, k, v, mask, 0.4, None, index)
    weighing = torch.randn(o_BHSC.shape, generator=torch.Generator().manual_seed(1)).to(o_BHSC)
    loss = (o_BHSC * weighing).sum()
    if isinstance(core, SelectedPairs):
        total = sum(x[... if counted_BS is None else counted_BS].sum() for x in core.losses)
        loss = loss + total
    gradients = torch.autograd.grad(loss, tensors)
    return [o_BHSC.detach(), total.detach(), *gradients]


@pytest.mark.parametrize("all_count", [True, False])
@pytest.mark.parametrize("mask_documents", [True, False])
@pytest.mark.parametrize("top_k", [1, 4, 64, None])
def test_sparse_attention_and_loss_equal_the_formulas(
    top_k: int | None, mask_documents: bool, all_count: bool
):
    tensors = drawn()
    counted_BS = None if all_count else torch.arange(LENGTH).expand(ROWS, -1) % 3 > 0
    wanted = run(SelectedPairs(mask_documents=mask_documents), tensors, top_k, counted_BS)
    found = run(SparseAttention(mask_documents=mask_documents), tensors, top_k, counted_BS)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).norm() <= 1e-12 * theirs.norm()
    assert wanted[1] > 1 or top_k == 1, "a choice of one key leaves nothing to learn"


def test_bfloat16_computes_scores_and_loss_in_float32():
    tensors = drawn(dtype=torch.bfloat16)
    tensors[-1] = tensors[-1].detach().float().requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in tensors]
    found = run(SparseAttention(mask_documents=True), tensors, 4)
    wanted = run(SparseAttention(mask_documents=True), exact, 4)
    assert (found[1] - wanted[1]).abs() <= 1e-6 * wanted[1]
    for ours, theirs in zip(found[2:], wanted[2:], strict=True):
        assert (ours - theirs).norm() <= 2e-2 * theirs.norm()


def test_earlier_key_is_selected_of_equal_scores():
    scores = torch.tensor([[[0.0, -0.0, 2.0, 0.0, -1.0, 2.0, 0.0]]])
    for top_k, keys in ((1, [2]), (2, [2, 5]), (4, [2, 5, 0, 1]), (9, [2, 5, 0, 1, 3, 6, 4])):
        chosen = unpack_keys(select_keys(scores, top_k), 7)
        assert chosen[0, 0].nonzero()[:, 0].tolist() == sorted(keys)
    many = torch.zeros(1, 1, 5000)
    assert torch.equal(unpack_keys(select_keys(many, 300), 5000)[0, 0], torch.arange(5000) < 300)


@pytest.mark.parametrize("num_keys", [1, 7, 8, 23, 64])
def test_packed_keys_take_a_bit_each_and_exclude_unseen_keys(num_keys: int):
    scores = torch.randn(2, 5, num_keys, generator=torch.Generator().manual_seed(0))
    scores[:, 1:3, num_keys // 3 :] = -torch.inf
    packed = select_keys(scores, 4)
    chosen = unpack_keys(packed, num_keys)
    bits = np.unpackbits(packed.numpy(), axis=-1, bitorder="little", count=num_keys)
    assert packed.shape == (2, 5, -(-num_keys // 8)) and (chosen.numpy() == bits).all()
    seen = scores > -torch.inf
    assert not chosen[~seen].any() and torch.equal(chosen.sum(-1), seen.sum(-1).clamp(max=4))
    assert torch.equal(pack_keys(chosen), packed)


def test_attention_sees_decided_keys_whatever_their_scores():
    q, k, v, *own = drawn()
    core = SparseAttention(mask_documents=False)
    first_BST = (torch.arange(LENGTH) == 0).expand(ROWS, LENGTH, LENGTH)
    index = Index(*own, 1, lambda scores: pack_keys(first_BST), None)
    o_BHSC = core(q, k, v, core.mask(DOCUMENTS_BS), 0.4, None, index)
    torch.testing.assert_close(o_BHSC, v[:, :, :1].expand_as(o_BHSC))


def test_indexer_scores_cost_the_counted_flops():
    _, _, _, *own = drawn()
    with FlopCounterMode(display=False) as counter:
        index_scores(*own)
    assert counter.get_total_flops() == 2 * ROWS * LENGTH * LENGTH * INDEX_HEADS * 8
