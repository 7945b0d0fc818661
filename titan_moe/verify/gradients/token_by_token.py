"""The recurrence of the reference: one token after another, as the paper writes it."""

import torch
import torch.nn.functional as F
from torch import Tensor


class TokenByToken:
    """A RecurrentCore; the mask is the document of each token."""

    def __init__(self, *, mask_documents: bool) -> None:
        self._mask_documents = mask_documents

    def mask(self, documents_BS: Tensor) -> Tensor:
        return documents_BS if self._mask_documents else torch.zeros_like(documents_BS)

    def convolve(self, x_BSC: Tensor, weight_C1W: Tensor, documents_BS: Tensor) -> Tensor:
        sums = []
        for t in range(x_BSC.shape[1]):
            total_BC = torch.zeros_like(x_BSC[:, t])
            for back in range(min(t + 1, weight_C1W.shape[-1])):
                same_B1 = documents_BS[:, t - back, None] == documents_BS[:, t, None]
                total_BC = total_BC + x_BSC[:, t - back] * weight_C1W[:, 0, -1 - back] * same_B1
            sums.append(total_BC)
        return F.silu(torch.stack(sums, 1))

    def __call__(  # type: ignore[no-untyped-def]
        self, q_BGSK, k_BGSK, v_BHSV, documents_BS: Tensor, decay_BHS, beta_BHS
    ) -> Tensor:
        return recur(q_BGSK, k_BGSK, v_BHSV, documents_BS, decay_BHS, beta_BHS)[0]


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
