"""Attention to the keys that an indexer selects: DeepSeek sparse attention (arXiv 2512.02556, 2.1).

A small indexer scores all keys that a query sees: I = sum over its heads of weight * relu(q . k).
Attention sees the top_k best of them. The selection is a decision, like the routing of tokens: a
set of keys without a gradient, a bit for each key, made once per forward pass. Of equal scores,
such as the zeros that relu makes, the earlier key is selected, so that every layout selects the
same keys.

The indexer learns from a loss of its own, sum over queries of KL(p || softmax(I)), where p is the
attention's distribution over its keys, summed over heads and normalised, without a gradient.

The price: products of all pairs are computed, and matrices of all pairs are in memory, a few of one
layer at a time. Only the mask is kept for the backward, a byte a pair. Any device and type.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from titan_moe.ops.attention import explicit_mask, sdpa
from titan_moe.ops.operation import at_least_float32


class Index(NamedTuple):
    """Holds an indexer's values of a layer's tokens, and the functions that use its selection and
    its loss."""

    q_BSHC: Tensor
    k_BSC: Tensor
    """A key of each token, for all of the indexer's heads."""
    weights_BSH: Tensor
    """Weight of each head of each query; includes all factors of the scores."""
    top_k: int | None
    """Keys that a query attends to; None: all that it sees."""
    decide: Callable[[Tensor], Tensor]
    """Takes the scores; returns keys as `select_keys` does, or keys decided before."""
    add_loss: Callable[[Tensor, Tensor], Tensor] | None
    """Takes attention's output and the loss, a number without a gradient; returns the output, whose
    backward adds the loss up. None: without a loss."""
    counted_BS: Tensor | None = None
    """False for queries that the loss leaves out; None: all count."""


class SharedKeys(NamedTuple):
    """Takes the place of an `Index` in a layer that sees the keys of another one."""

    decide: Callable[[], Tensor] | None
    """Returns what `select_keys` returned in that layer. None: attention sees all keys."""


Keys = Index | SharedKeys


class SparseAttention:
    """An AttentionCore of whole sequences, whose calls take an `Index` or `SharedKeys` too.

    Args:
        mask_documents: whether documents packed into a sequence are kept apart.
        heads_group: ranks that hold other heads of the same tokens, and the same index: each adds
            its part of the loss. None: this process has all heads.
    """

    def __init__(self, *, mask_documents: bool, heads_group: ProcessGroup | None = None) -> None:
        self._mask_documents, self._heads_group = mask_documents, heads_group

    def mask(self, documents_BS: Tensor, local=None, bounds=None) -> Tensor:  # type: ignore[no-untyped-def]
        """The keys that each query sees, before any is selected: [B, queries, keys] bool."""
        return explicit_mask(documents_BS, local, mask_documents=self._mask_documents)[:, 0]

    def whole_sequences(self, x_BHSC: Tensor) -> Tensor:
        """Returns keys or values of whole sequences, given those of this process's tokens."""
        return x_BHSC

    @torch.compiler.disable
    def __call__(  # type: ignore[no-untyped-def]
        self, q_BHSC, k_BHSC, v_BHSC, mask, scale, sinks_H=None, index: Keys | None = None
    ) -> Tensor:
        assert sinks_H is None and index is not None
        k_BHTC, v_BHTC = self.whole_sequences(k_BHSC), self.whole_sequences(v_BHSC)
        if isinstance(index, SharedKeys):
            chosen_BST = mask
            if index.decide is not None:
                chosen_BST = unpack_keys(index.decide(), k_BHTC.shape[2]) & mask
            return sdpa(q_BHSC, k_BHTC, v_BHTC, chosen_BST[:, None], scale)
        index_k_BTC = self.whole_sequences(index.k_BSC[:, None])[:, 0]
        own = index.q_BSHC, index_k_BTC, index.weights_BSH
        with torch.no_grad():
            scores_BST = index_scores(*own).masked_fill_(~mask, -torch.inf)
            chosen_BST = mask
            if index.top_k is not None:
                chosen_BST = unpack_keys(index.decide(scores_BST), scores_BST.shape[-1]) & mask
        o_BHSC = sdpa(q_BHSC, k_BHTC, v_BHTC, chosen_BST[:, None], scale)
        if index.add_loss is None:
            return o_BHSC
        target_BST = self._target(q_BHSC, k_BHTC, chosen_BST, scale)
        share: Any = 1 if self._heads_group is None else 1 / self._heads_group.size()
        if index.counted_BS is not None:
            share = share * index.counted_BS[..., None].to(scores_BST.dtype)
        loss = o_BHSC, *own, scores_BST, target_BST, chosen_BST, share
        return index.add_loss(*_WithIndexerLoss.apply(*loss))

    @torch.no_grad()
    def _target(self, q_BHSC: Tensor, k_BHTC: Tensor, chosen_BST: Tensor, scale: float) -> Tensor:
        """Returns the softmaxes over each query's chosen keys, summed over all heads and
        normalised: [B, S, T]."""
        wide = at_least_float32(q_BHSC)
        target_BST = q_BHSC.new_zeros(len(q_BHSC), *chosen_BST.shape[1:], dtype=wide)
        for q_BSC, k_BTC in zip(q_BHSC.unbind(1), k_BHTC.unbind(1), strict=True):
            scores_BST = _product(q_BSC, k_BTC.mT).mul_(scale)
            target_BST += scores_BST.masked_fill_(~chosen_BST, -torch.inf).softmax(-1)
        if self._heads_group is not None:
            dist.all_reduce(target_BST, group=self._heads_group)
        return target_BST / target_BST.sum(-1, keepdim=True)


def index_scores(q_BSHC: Tensor, k_BTC: Tensor, weights_BSH: Tensor) -> Tensor:
    """The sum over heads of weight * relu(q . k), in at least float32: [B, S, T]."""
    wide = at_least_float32(q_BSHC)
    scores_BST = weights_BSH.new_zeros(*q_BSHC.shape[:2], k_BTC.shape[1], dtype=wide)
    for q_BSC, weight_BS in zip(q_BSHC.unbind(2), weights_BSH.unbind(2), strict=True):
        # One head after another: all heads' products would be as many times as large.
        scores_BST += _product(q_BSC, k_BTC.mT).relu_().mul_(weight_BS[..., None])
    return scores_BST


def select_keys(scores_BST: Tensor, top_k: int) -> Tensor:
    """The keys of the largest scores of each query, packed; of equal scores the earlier key.

    A key whose score is -inf is not selected. A sort, as `topk` leaves open which of equal scores
    it returns.
    """
    best_BSK = scores_BST.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    chosen_BST = torch.zeros_like(scores_BST, dtype=torch.bool).scatter_(-1, best_BSK, True)
    return pack_keys(chosen_BST.logical_and_(scores_BST != -torch.inf))


def pack_keys(chosen_BST: Tensor) -> Tensor:
    """A bit for each key, eight in a byte, the earliest lowest: [B, S, W] uint8 of bool."""
    bits = F.pad(chosen_BST.byte(), (0, -chosen_BST.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return bits.bitwise_left_shift_(_places(bits)).sum(-1, dtype=torch.uint8)


def unpack_keys(keys_BSW: Tensor, num_keys: int) -> Tensor:
    """The inverse of `pack_keys`."""
    bits = keys_BSW[..., None].bitwise_right_shift(_places(keys_BSW)).bitwise_and_(1)
    return bits.bool().flatten(-2)[..., :num_keys]


def _places(bits: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=bits.device)


class _WithIndexerLoss(torch.autograd.Function):
    """Returns attention's output unchanged, and adds the backward of an indexer's loss to its own.
    Also returns the loss: a share of the sum over queries of KL(target || softmax of their chosen
    keys' scores).

    The gradients are made in the forward: three tensors of tokens are kept, and none of pairs. The
    loss is returned to be counted outside: a split backward runs this node twice, once for the
    stream and once for the indexer's weights.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, o_BHSC, q_BSHC, k_BTC, weights_BSH, scores_BST, target_BST, chosen_BST, share
    ):
        log_BST = scores_BST.masked_fill(~chosen_BST, -torch.inf).log_softmax(-1)
        # The softmax's gradient is its own value less the target's.
        grad_BST = (log_BST.exp() - target_BST).mul_(share)
        log_BST.masked_fill_(~chosen_BST, 0)
        loss_BST = torch.special.xlogy(target_BST, target_BST) - target_BST * log_BST
        loss = (loss_BST * share).sum()
        ctx.save_for_backward(*_gradients_of_scores(grad_BST, q_BSHC, k_BTC, weights_BSH))
        ctx.mark_non_differentiable(loss)
        return o_BHSC.detach(), loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BHSC: Tensor, _):  # type: ignore[override, no-untyped-def]
        return grad_BHSC, *ctx.saved_tensors, None, None, None, None


def _gradients_of_scores(
    grad_BST: Tensor, q_BSHC: Tensor, k_BTC: Tensor, weights_BSH: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and the weights, given the gradient of `index_scores`.

    The factors of q and k are rounded to their type, as in flash attention.
    """
    grad_q, grad_weights = torch.empty_like(q_BSHC), torch.empty_like(weights_BSH)
    grad_k = torch.zeros_like(k_BTC, dtype=grad_BST.dtype)
    heads = zip(q_BSHC.unbind(2), weights_BSH.unbind(2), strict=True)
    for head, (q_BSC, weight_BS) in enumerate(heads):
        products_BST = _product(q_BSC, k_BTC.mT).relu_()
        grad_weights[..., head] = (grad_BST * products_BST).sum(-1)
        grad_products = grad_BST * weight_BS[..., None] * (products_BST > 0)
        grad_products = grad_products.to(q_BSC.dtype)
        grad_q[:, :, head] = grad_products @ k_BTC
        grad_k += _product(grad_products.mT, q_BSC)
    return grad_q, grad_k.to(k_BTC.dtype), grad_weights


def _product(a_BXY: Tensor, b_BYZ: Tensor) -> Tensor:
    """Multiplies matrices in at least float32. CUDA multiplies narrow numbers and adds wide
    ones."""
    wide = at_least_float32(a_BXY)
    if a_BXY.is_cuda and a_BXY.dtype != wide:
        return torch.bmm(a_BXY, b_BYZ, out_dtype=wide)
    return a_BXY.to(wide) @ b_BYZ.to(wide)
