"""Attention and recurrence of the reference, as the papers write them: over all pairs of tokens,
sparse with one query after another, and recurrent with one token after another."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.ops.attention import explicit_mask, sdpa
from titan_moe.ops.local_attention import LocalAttention
from titan_moe.ops.sparse_attention import Keys, SharedKeys


@dataclass
class AllPairs:
    """An attention core by an explicit mask and torch's own kernel over all pairs."""

    mask_documents: bool

    def mask(
        self, documents_BS: Tensor, local: LocalAttention | None = None, bounds: object = None
    ) -> Tensor:
        return explicit_mask(documents_BS, local, mask_documents=self.mask_documents)

    __call__ = staticmethod(sdpa)


@dataclass
class SelectedPairs(AllPairs):
    """An attention core that takes an `Index`; arXiv 2512.02556, equations 1 to 4."""

    losses: list[Tensor] = field(default_factory=list)
    """The indexers' losses, one of each call, by query: loss_BS."""
    chosen_B1ST: Tensor | None = None
    """The keys that the latest indexer chose, which layers with its keys share."""

    def __call__(  # type: ignore[no-untyped-def, override]
        self, q_BHSC, k_BHSC, v_BHSC, mask, scale, sinks_H=None, index: Keys | None = None
    ) -> Tensor:
        assert index is not None
        if isinstance(index, SharedKeys):
            assert self.chosen_B1ST is not None
            attention_BHST = (q_BHSC @ k_BHSC.mT * scale).where(self.chosen_B1ST, -torch.inf)
            self.losses.append(q_BHSC.new_zeros(len(q_BHSC), q_BHSC.shape[2]))
            return attention_BHST.softmax(-1) @ v_BHSC
        products_BHST = torch.einsum("bshc,btc->bhst", index.q_BSHC, index.k_BSC)
        scores_BST = torch.einsum("bsh,bhst->bst", index.weights_BSH, products_BHST.relu())
        chosen_BST = selected(scores_BST, mask[:, 0].expand_as(scores_BST), index.top_k)
        self.chosen_B1ST = chosen_BST[:, None]
        attention_BHST = (q_BHSC @ k_BHSC.mT * scale).where(self.chosen_B1ST, -torch.inf)
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


@dataclass
class TokenByToken:
    """A recurrence, one token after another; the mask is the document of each token."""

    mask_documents: bool

    def mask(self, documents_BS: Tensor) -> Tensor:
        return documents_BS if self.mask_documents else torch.zeros_like(documents_BS)

    def convolve(  # type: ignore[no-untyped-def]
        self, x_BSC: Tensor, weight_C1W: Tensor, documents_BS: Tensor, bias_C=None
    ) -> Tensor:
        sums = []
        for t in range(x_BSC.shape[1]):
            total_BC = torch.zeros_like(x_BSC[:, t]) + (0 if bias_C is None else bias_C)
            for back in range(min(t + 1, weight_C1W.shape[-1])):
                same_B1 = documents_BS[:, t - back, None] == documents_BS[:, t, None]
                total_BC = total_BC + x_BSC[:, t - back] * weight_C1W[:, 0, -1 - back] * same_B1
            sums.append(total_BC)
        return F.silu(torch.stack(sums, 1))

    def __call__(  # type: ignore[no-untyped-def]
        self, q_BGSK, k_BGSK, v_BHSV, documents_BS: Tensor, decay_BHS, beta_BHS, erases: bool = True
    ) -> Tensor:
        step = recur if erases else recur_additively
        return step(q_BGSK, k_BGSK, v_BHSV, documents_BS, decay_BHS, beta_BHS)[0]


def recur(  # type: ignore[no-untyped-def]
    q_BGSK, k_BGSK, v_BHSV, documents_BS: Tensor, decay_BHS, beta_BHS, state_BHKV=None
) -> tuple[Tensor, Tensor]:
    """arXiv 2412.06464, equation 10, with keys and queries of unit length: o_BHSV, and the state
    after the last token.

    Args:
        decay_BHS: [B, H, S, K] where the channels of a key decay apart (arXiv 2510.26692).
        state_BHKV: the state before the first token, which continues its document; None: zero.
    """
    batch, heads, length, values = v_BHSV.shape
    q, k = (
        x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        for x in (x.repeat_interleave(heads // x.shape[1], 1) for x in (q_BGSK, k_BGSK))
    )
    keys = k.shape[-1]
    decay = decay_BHS if decay_BHS.ndim == 4 else decay_BHS[..., None]
    state = v_BHSV.new_zeros(batch, heads, keys, values) if state_BHKV is None else state_BHKV
    outputs = []
    for t in range(length):
        if t:
            same_B = documents_BS[:, t] == documents_BS[:, t - 1]
            state = state.where(same_B[:, None, None, None], 0)
        key, query = k[:, :, t, :, None], q[:, :, t, None, :]
        state = decay[:, :, t, :, None].exp() * state
        missing = v_BHSV[:, :, t, None, :] - key.mT @ state
        state = state + key @ (beta_BHS[:, :, t, None, None] * missing)
        outputs.append(query @ state / keys**0.5)
    return torch.cat(outputs, 2), state


def recur_additively(  # type: ignore[no-untyped-def]
    c_BGSK, b_BGSK, x_BHSV, documents_BS: Tensor, decay_BHS, dt_BHS, state_BHKV=None
) -> tuple[Tensor, Tensor]:
    """arXiv 2405.21060, equation 1, with dt B for its B: o_BHSV, and the state after the last
    token. `state_BHKV`: as `recur` takes it."""
    batch, heads, length, values = x_BHSV.shape
    c, b = (x.repeat_interleave(heads // x.shape[1], 1) for x in (c_BGSK, b_BGSK))
    state = state_BHKV
    if state is None:
        state = x_BHSV.new_zeros(batch, heads, b.shape[-1], values)
    outputs = []
    for t in range(length):
        if t:
            same_B = documents_BS[:, t] == documents_BS[:, t - 1]
            state = state.where(same_B[:, None, None, None], 0)
        decay, dt = (x[:, :, t, None, None] for x in (decay_BHS, dt_BHS))
        state = decay.exp() * state + (dt * b[:, :, t, :, None]) @ x_BHSV[:, :, t, None, :]
        outputs.append(c[:, :, t, None, :] @ state)
    return torch.cat(outputs, 2), state
