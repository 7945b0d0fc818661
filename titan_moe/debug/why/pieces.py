"""Gradients of a step and of its pieces, on one plain process.

The loss is a sum over target tokens and every reduction is a plain sum (docs/parallelism.md). So a
step's gradient is, but for rounding, the sum of the gradients of its pieces: for each document the
cross-entropies of its targets, its whole sequence being the input; and for each sequence the
auxiliary losses of its routing. Those are sums over tokens too, but the factors of the
sequence-wise loss are the choices of the whole sequence, and targets that are left out leave its
tokens in: they belong to the sequence, not to one document. The routing bias moves by the sign of
counts, which is no sum of anything; it does so after the gradient.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from titan_moe.data.batch import IGNORE_INDEX, Batch
from titan_moe.distributed.dtensor import local_part
from titan_moe.distributed.grad_norm import ParameterNorms
from titan_moe.distributed.parallelize import ShardedModel
from titan_moe.distributed.tied_weights import sum_tied_grads
from titan_moe.moe.router import local_expert_counts
from titan_moe.ops.cross_entropy import at_least_float32
from titan_moe.train_step import local_batch, num_local_targets


class Sums(NamedTuple):
    """What a backward has left, not divided by anything."""

    loss: float
    """The sum of cross-entropies."""
    num_targets: int
    norms: dict[str, list[float]]
    """Of each parameter's gradient [1], of a stack of experts [E]."""
    counts: dict[str, list[int]]
    """Tokens of each expert by MoE layer, where they are counted."""

    @property
    def norm(self) -> float:
        """Of the whole gradient."""
        return sum(norm * norm for norms in self.norms.values() for norm in norms) ** 0.5


class Pieces:
    """Computes gradients on a model of one process, whose parameters stay as they are."""

    def __init__(self, sharded: ShardedModel, device: torch.device) -> None:
        moe = sharded.config.moe
        self._sharded, self._device = sharded, device
        self._num_experts = moe.num_experts if moe is not None else 0
        self._parameters = dict(sharded.named_parameters())
        self._layers = sharded.moe_layers()
        self._norms = ParameterNorms(sharded.names, self._num_experts)
        self._whole: dict[nn.Parameter, Tensor] = {}

    @property
    def has_balance_losses(self) -> bool:
        """Whether routing has losses of its own."""
        moe = self._sharded.config.moe
        weights = () if moe is None else (moe.sequence_aux_loss_weight, moe.z_loss_weight)
        return moe is not None and any((*weights, moe.global_aux_loss_weight))

    def sums(self, batches: Sequence[Batch], *, balance: bool = True) -> Sums:
        """Forward and backward; the gradients stay in place until the next call.

        Args:
            balance: with the auxiliary losses of routing, and counting its choices.
        """
        for parameter in self._parameters.values():
            parameter.grad = None
        for moe in self._layers.values():
            moe.train(balance)
        self._counts()
        sharded = self._sharded
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        for number, batch in enumerate(batches, 1):
            local = local_batch(batch, sharded, self._device)
            loss += sharded.execution.train(local, last=number == len(batches))
        if sharded.tied_weights.copies:
            sum_tied_grads(sharded.tied_weights, sharded.meshes.group("pp"), self._device)
        squares = self._norms.squares(self._parameters.items(), 1, self._device)
        return Sums(
            loss.item(),
            sum(num_local_targets(batch, sharded) for batch in batches),
            self._norms.by_name(squares, 1.0),
            self._counts(),
        )

    def keep(self) -> None:
        """Keep the gradients of the last call as those of the whole step, for `along`."""
        replicas = self._sharded.tied_weights.replicas
        self._whole = {
            parameter: local_part(parameter.grad).clone()
            for parameter in self._parameters.values()
            if parameter.grad is not None and parameter not in replicas
        }

    @torch.no_grad()
    def along(self) -> float:
        """The product of the last call's gradient with the whole step's. Those of all pieces of the
        step add up to its squared norm."""
        products = [
            (local_part(parameter.grad) * whole).sum(dtype=torch.float64)
            for parameter, whole in self._whole.items()
            if parameter.grad is not None
        ]
        return float(torch.stack(products).sum())

    def token_losses(self, row: Batch) -> tuple[Sums, Tensor]:
        """As `sums` of one sequence, and its cross-entropy at each position, [S] float64."""
        (output,) = [part.output for part in self._sharded.parts]
        labels_S = row.labels_BS[0].to(self._device)
        found: list[Tensor] = []

        def watch(first: int, logits_tV: Tensor, grad_tV: Tensor) -> None:
            labels_t = labels_S[first : first + len(logits_tV)]
            if len(labels_t):  # Multi-token prediction's follow.
                found.append(_cross_entropies(logits_tV[: len(labels_t)], labels_t))

        output.watch = watch
        sums = self.sums([row])
        output.watch = None
        return sums, torch.cat(found).cpu()

    @contextmanager
    def without_output(self, layer: str, expert: int) -> Iterator[None]:
        """While open, an expert's output is zero, and so are the gradients that pass through it."""
        names = [f"{layer}.moe.experts.{last}" for last in ("w2", "b2")]
        outputs = [
            local_part(self._parameters[name].detach())[expert]
            for name in names
            if name in self._parameters
        ]
        saved = [each.clone() for each in outputs]
        for each in outputs:
            each.zero_()
        try:
            yield
        finally:
            for each, values in zip(outputs, saved, strict=True):
                each.copy_(values)

    def _counts(self) -> dict[str, list[int]]:
        """Those since the last call, which begin anew."""
        if not self._layers:
            return {}
        names = list(self._layers)
        counts_LE = local_expert_counts(
            {name: moe.router for name, moe in self._layers.items()},
            names,
            num_experts=self._num_experts,
            device=self._device,
        )
        return dict(zip(names, counts_LE.tolist(), strict=True))


@torch.no_grad()
def _cross_entropies(logits_tV: Tensor, labels_t: Tensor) -> Tensor:
    wide_tV = logits_tV.to(at_least_float32(logits_tV))
    ignored_t = labels_t == IGNORE_INDEX
    target_t = wide_tV.gather(1, labels_t.masked_fill(ignored_t, 0)[:, None])[:, 0]
    return (wide_tV.logsumexp(-1) - target_t).masked_fill(ignored_t, 0).double()


def sequences(batches: Sequence[Batch]) -> list[Batch]:
    """Each sequence of a step as a microbatch of its own, in the order of the global batch."""
    return [
        Batch(
            tokens_BS=batch.tokens_BS[at : at + 1],
            labels_BS=batch.labels_BS[at : at + 1],
            documents_BS=batch.documents_BS[at : at + 1],
            samples=[batch.samples[at]],
        )
        for batch in batches
        for at in range(len(batch.samples))
    ]


def documents_of(row: Batch) -> list[int]:
    """The documents of a sequence that have targets, by their number in it."""
    found = row.documents_BS[row.labels_BS != IGNORE_INDEX].unique()
    return [int(document) for document in found]


def only(row: Batch, document: int | None) -> Batch:
    """A sequence of which one document's targets count; None: no target at all."""
    others_BS = torch.ones_like(row.documents_BS, dtype=torch.bool)
    if document is not None:
        others_BS = row.documents_BS != document
    return replace(row, labels_BS=row.labels_BS.masked_fill(others_BS, IGNORE_INDEX))


def without(batches: Sequence[Batch], left_out: set[tuple[int, int]]) -> list[Batch]:
    """The step's microbatches, without the targets of documents: numbers of sequence and document.
    Their tokens stay: what attends to them sees what it saw."""
    first, made = 0, []
    for batch in batches:
        labels_BS = batch.labels_BS.clone()
        for row, document in left_out:
            if first <= row < first + len(labels_BS):
                at = row - first
                labels_BS[at].masked_fill_(batch.documents_BS[at] == document, IGNORE_INDEX)
        made.append(replace(batch, labels_BS=labels_BS))
        first += len(labels_BS)
    return made
