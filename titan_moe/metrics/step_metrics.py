"""Figures of a step: sums that layers keep on the device, and how evenly experts are loaded.

To add a device metric, keep a sum in the module that knows it (a float64 or int64 buffer, zeroed in
`init_buffers`), and name it in `METRICS`. In a logged step it joins the step's one
all-reduce, the log writes it under its name, and the buffer starts again from zero.

A layer's forward may run a second time, recomputed in the backward, where adding to a buffer is an
error. So a layer adds in the backward, which runs once: `x = attach_loss(x, value.detach(), total)`
(moe/balance.py) adds `value` to the buffer `total` and leaves x and its gradient as they are. What
`MoE.choose` adds is not recomputed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from titan_moe.comm.collectives import added
from titan_moe.models.indexer import Indexer
from titan_moe.models.mtp import MultiTokenPrediction
from titan_moe.moe.layer import MoE


@dataclass(frozen=True)
class DeviceMetric:
    """The sum of scalars over the layers of all ranks, divided by another such sum."""

    name: str
    """The key in metrics.jsonl."""
    sums: Sequence[Tensor]
    """Scalars of this rank's layers; ranks without such a layer have none."""
    per: Sequence[Tensor] | None = None
    """Scalars whose sum divides; nothing is logged where it is 0. None: target tokens."""
    logged: bool = True
    """False where no rank has such a layer."""


class DeviceMetrics:
    """All device metrics of a step. Every rank makes the same ones in the same order.

    The tensors are kept, and read at every step: they are those that the layers add to.
    """

    def __init__(self, metrics: Sequence[DeviceMetric], *, device: torch.device) -> None:
        self._metrics = metrics
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._by_type: dict[torch.dtype, list[Tensor]] = {}
        for metric in metrics:
            for each in (*metric.sums, *(metric.per or ())):
                self._by_type.setdefault(each.dtype, []).append(each)

    def terms(self) -> dict[str, Tensor]:
        """Returns this rank's terms of every sum, to be added up over the world."""
        terms = {}
        for metric in self._metrics:
            terms[metric.name] = added(metric.sums, like=self._zero)
            if metric.per is not None:
                terms[_divisor(metric)] = added(metric.per, like=self._zero)
        return terms

    def values(self, sums: Mapping[str, float], *, num_targets: int) -> dict[str, float]:
        """Returns the values to log, from the sums of `terms` over the world."""
        values = {}
        for metric in self._metrics:
            divisor = max(num_targets, 1) if metric.per is None else sums[_divisor(metric)]
            if metric.logged and divisor:
                values[metric.name] = sums[metric.name] / divisor
        return values

    def reset(self) -> None:
        """Start all sums again from zero, logged or not."""
        for tensors in self._by_type.values():
            torch._foreach_zero_(tensors)


def _divisor(metric: DeviceMetric) -> str:
    return f"{metric.name} per"


class Layers(NamedTuple):
    """This rank's layers that keep sums, and which of them the model has on any rank."""

    moe: Sequence[MoE]
    mtp: Sequence[MultiTokenPrediction]
    indexers: Sequence[Indexer]
    predicts_ahead: bool
    selects: bool


def _balance_loss(layers: Layers) -> DeviceMetric:
    """Sum of all layers' weighted auxiliary losses, per target token."""
    return DeviceMetric("balance_loss", [moe.router.balance_loss for moe in layers.moe])


def _mtp_loss(layers: Layers) -> DeviceMetric:
    """Weighted loss of multi-token prediction, per target token. Summed where there is none too:
    the rounding of the other sums depends on the length of the all-reduce."""
    sums = [part.loss_sum for part in layers.mtp]
    return DeviceMetric("mtp_loss", sums, logged=layers.predicts_ahead)


def _rows_over_bound(layers: Layers) -> DeviceMetric:
    """Rows that dispatch sent between ranks over the fewest that would have done: the distinct
    pairs of token and destination rank."""
    sent, fewest = ([moe.rows_sent[n] for moe in layers.moe] for n in (0, 1))
    return DeviceMetric("dispatch/rows_over_bound", sent, per=fewest)


def _indexer_loss(layers: Layers) -> DeviceMetric | None:
    """Sum of all layers' divergences of the indexers from attention, per target token."""
    sums = [indexer.loss_sum for indexer in layers.indexers]
    return DeviceMetric("indexer_loss", sums) if layers.selects else None


METRICS: list[Callable[[Layers], DeviceMetric | None]] = [
    _balance_loss,
    _mtp_loss,
    _rows_over_bound,
    _indexer_loss,
]
"""Make the device metrics of a model; the same ones on all ranks."""


def expert_load(counts_LE: Tensor, layers: Sequence[str]) -> dict[str, float]:
    """Load figures of each MoE layer, under "moe/<name>/".

    - "max_over_mean": rows of the busiest expert over the mean: 1 is even, E is collapse.
    - "cv": coefficient of variation, the standard deviation over the mean.
    - "entropy": of the load, over ln E: 1 is even, 0 is collapse.
    - "dead": experts without a single row.

    A layer without any row reads 0, 0, 0 and E.

    Args:
        counts_LE: rows per MoE layer and expert over the whole job. One host sync for all layers.
        layers: the name of each of the L layers, such as layers.3.
    """
    num_experts = counts_LE.shape[1]
    load_LE = counts_LE.double()
    mean_L = load_LE.mean(1)
    divisor_L = mean_L.clamp(min=1 / num_experts)  # Only a layer without rows lies below.
    share_LE = load_LE / (divisor_L * num_experts)[:, None]
    figures = {
        "max_over_mean": load_LE.amax(1) / divisor_L,
        "cv": load_LE.std(1, correction=0) / divisor_L,
        "entropy": torch.special.entr(share_LE).sum(1) / math.log(max(num_experts, 2)),
        "dead": (counts_LE == 0).sum(1).double(),
    }
    rows = torch.stack(list(figures.values()), dim=1).tolist()
    return {
        f"moe/{layer}/{name}": value
        for layer, row in zip(layers, rows, strict=True)
        for name, value in zip(figures, row, strict=True)
    }
