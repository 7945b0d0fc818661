"""Runs a rank's part of the model over a batch of sequences: whole, or as stages of a pipeline."""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from titan_moe.distributed.fsdp import StepSync
from titan_moe.ops.varlen_attention import DocumentBounds


class LocalBatch(NamedTuple):
    """Holds what a rank reads of a `data.batch.Batch`; S/cp is its part of each sequence.

    In a pipeline a schedule cuts it into microbatches."""

    tokens_BS: Tensor
    """[B, S/cp] token ids."""
    labels_BS: Tensor
    """[B, S/cp] the next token of each; IGNORE_INDEX where there is no target."""
    documents_BS: Tensor
    """[B, S] the document of every token of the whole sequences: masks look beyond the own part."""
    positions_BS: Tensor
    """[B, S/cp] position of each own token in its sequence, or in its document
    (`Plan.counts_in_documents`)."""
    ahead_tokens_BKS: Tensor | None = None
    """[B, K, S/cp] the tokens 1, 2, ..., K positions on, for multi-token prediction."""
    ahead_labels_BKS: Tensor | None = None
    """[B, K, S/cp] their next tokens, as `labels_BS`."""
    bounds: DocumentBounds | None = None
    """Upper bounds on the documents of any part of the batch; None: not known on the host."""
    counted_BS: Tensor | None = None
    """[B, S/cp] False for tokens that routers do not count (`Plan.counts_answers`)."""

    def beside_tokens(self) -> dict[str, Any]:
        """Returns the arguments of a decoder's forward besides the token ids, without any None."""
        named = self._asdict().items()
        return {k: v for k, v in named if k != "tokens_BS" and v is not None}


class Execution(Protocol):
    """Runs forward and backward. Ranks of one `cp` or `tp` group compute one sum of cross-entropies
    together: each returns its own share of the value, and each runs backward from the whole sum."""

    def accumulate(self, batch: LocalBatch, *, last: bool = True) -> Tensor:
        """Add the batch's gradients, as plain sums; returns this rank's share of the loss sum.

        Gradients stand where the optimizer looks for them after the `last` batch of a step.
        """

    def evaluate(self, batch: LocalBatch) -> Tensor:
        """This rank's share of the loss sum, without gradients."""


class WholeModel:
    """An Execution with all layers on this rank."""

    def __init__(self, model: nn.Module, sync: StepSync) -> None:
        self._model = model
        self._sync = sync

    def accumulate(self, batch: LocalBatch, *, last: bool = True) -> Tensor:
        self._sync.begin(last=last)
        loss = self._forward(batch)
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, batch: LocalBatch) -> Tensor:
        return self._forward(batch)

    def _forward(self, batch: LocalBatch) -> Tensor:
        return self._model(batch.tokens_BS, **batch.beside_tokens())
