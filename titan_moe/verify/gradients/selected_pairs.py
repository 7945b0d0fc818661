"""Attention of the reference: over all pairs of tokens, and sparse, one query after another."""

import torch
from torch import Tensor

from titan_moe.ops.attention import explicit_mask, sdpa
from titan_moe.ops.local_attention import LocalAttention
from titan_moe.ops.sparse_attention import Keys, SharedKeys


class AllPairs:
    """An attention core by an explicit mask and torch's own kernel over all pairs."""

    def __init__(self, *, mask_documents: bool) -> None:
        self._mask_documents = mask_documents

    def mask(
        self, documents_BS: Tensor, local: LocalAttention | None = None, bounds: object = None
    ) -> Tensor:
        return explicit_mask(documents_BS, local, mask_documents=self._mask_documents)

    __call__ = staticmethod(sdpa)


class SelectedPairs(AllPairs):
    """An attention core that takes an `Index`; arXiv 2512.02556, equations 1 to 4.

    Attributes:
        losses: of the indexers, one of each call, by query: loss_BS.
    """

    def __init__(self, *, mask_documents: bool) -> None:
        super().__init__(mask_documents=mask_documents)
        self.losses: list[Tensor] = []
        self._chosen = torch.empty(0, dtype=torch.bool)

    def __call__(  # type: ignore[no-untyped-def, override]
        self, q_BHSC, k_BHSC, v_BHSC, mask, scale, sinks_H=None, index: Keys | None = None
    ) -> Tensor:
        assert index is not None
        if isinstance(index, SharedKeys):
            attention_BHST = (q_BHSC @ k_BHSC.mT * scale).where(self._chosen, -torch.inf)
            self.losses.append(q_BHSC.new_zeros(len(q_BHSC), q_BHSC.shape[2]))
            return attention_BHST.softmax(-1) @ v_BHSC
        products_BHST = torch.einsum("bshc,btc->bhst", index.q_BSHC, index.k_BSC)
        scores_BST = torch.einsum("bsh,bhst->bst", index.weights_BSH, products_BHST.relu())
        chosen_BST = selected(scores_BST, mask[:, 0].expand_as(scores_BST), index.top_k)
        self._chosen = chosen_BST[:, None]
        attention_BHST = (q_BHSC @ k_BHSC.mT * scale).where(self._chosen, -torch.inf)
        attention_BHST = attention_BHST.softmax(-1)
        summed_BST = attention_BHST.detach().sum(1)
        target_BST = summed_BST / summed_BST.sum(-1, keepdim=True)
        guess_BST = scores_BST.where(chosen_BST, -torch.inf).softmax(-1)
        told = target_BST > 0
        ratio = target_BST[told] / guess_BST[told]
        terms_BST = torch.zeros_like(target_BST)
        terms_BST[told] = target_BST[told] * ratio.log()
        self.losses.append(terms_BST.sum(-1))
        return attention_BHST @ v_BHSC


def selected(scores_BST: Tensor, seen_BST: Tensor, top_k: int | None) -> Tensor:
    """The top_k keys of each query among those that it sees, the earlier of equal ones."""
    chosen_BST = torch.zeros_like(seen_BST)
    for row, query in torch.cartesian_prod(*map(torch.arange, scores_BST.shape[:2])).tolist():
        scores = scores_BST[row, query].tolist()
        keys = seen_BST[row, query].nonzero()[:, 0].tolist()
        best = sorted(keys, key=lambda key: (-scores[key], key))[:top_k]
        chosen_BST[row, query, best] = True
    return chosen_BST
