"""One optimizer step: the gradient rule in code.

The loss is a sum over target tokens, every reduction of a gradient is a plain sum, and one division
by the global number of target tokens of the step ends it. No other divisor exists.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from titan_moe.config.sections import Training
from titan_moe.data.batch import IGNORE_INDEX, Batch
from titan_moe.distributed import grad_norm
from titan_moe.distributed.meshes import Meshes
from titan_moe.models.decoder import Decoder
from titan_moe.optim.expert_bias import take_counts, update_routers


@dataclass(frozen=True)
class StepResult:
    """What a step measured, the same on every rank."""

    loss: float
    """Mean cross-entropy over the step's target tokens, in nats."""
    grad_norm: float
    """Global norm before clipping."""
    balance_loss: float
    """Sum of all layers' weighted auxiliary losses, per target token."""
    num_targets: int
    counts_LE: Tensor | None
    """Tokens per MoE layer and expert, over the whole world."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class TrainStep:
    """Forward, backward and update over the microbatches of one step."""

    def __init__(
        self,
        model: Decoder,
        meshes: Meshes,
        optimizer: Optimizer,
        training: Training,
        *,
        device: torch.device,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._max_norm = training.max_norm
        self._use_max = training.norm_type == "inf"
        self._parameters = list(model.parameters())
        self._moe_layers = list(model.moe_layers().values())
        self._ranks_per_stage = meshes.dims.world_size // meshes.dims.pp
        self._device = device

    def __call__(self, batches: list[Batch]) -> StepResult:
        """Train on one step's microbatches.

        If the result is not finite, nothing is updated, and the gradients stay for whoever looks
        for the reason; `discard` clears them. A step without a target token updates nothing either.
        """
        result = self._accumulate(batches)
        if not result.finite:
            return result
        if result.num_targets > 0:
            self._update(result)
        self.discard()
        return result

    def _update(self, result: StepResult) -> None:
        clip = grad_norm.clip_factor(result.grad_norm, self._max_norm)
        grad_norm.scale_grads(self._parameters, clip / result.num_targets)
        if result.counts_LE is not None:
            update_routers(self._moe_layers, result.counts_LE)
        self._optimizer.step()

    def discard(self) -> None:
        """Free all gradients."""
        self._optimizer.zero_grad()

    def _accumulate(self, batches: list[Batch]) -> StepResult:
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        num_targets = 0
        for batch in batches:
            loss = batch_loss(self._model, batch, self._device)
            loss.backward()
            loss_sum += loss.detach()
            num_targets += int((batch.labels_BS != IGNORE_INDEX).sum())
        counts_LE = take_counts(self._moe_layers) if self._moe_layers else None
        return self._reduce(loss_sum, num_targets, counts_LE)

    def _reduce(self, loss_sum: Tensor, num_targets: int, counts_LE: Tensor | None) -> StepResult:
        squares = grad_norm.sum_of_squares(self._parameters, self._ranks_per_stage)
        balance = [moe.router.balance_loss for moe in self._moe_layers]
        sums = torch.stack(
            [
                loss_sum,
                torch.tensor(float(num_targets), dtype=torch.float64, device=self._device),
                squares.to(self._device),
                torch.stack(balance).sum() if balance else torch.zeros_like(loss_sum),
            ]
        )
        for total in balance:
            total.zero_()
        dist.all_reduce(sums)
        # Host sync, once per step: whether to update at all is decided on these numbers.
        loss, targets, norm, balance_loss = sums.tolist()
        norm = math.sqrt(norm)
        # A maximum over ranks may drop a NaN; the sum of squares never does.
        if self._use_max and math.isfinite(norm):
            norm = self._max_of_grads()
        divisor = max(targets, 1.0)
        return StepResult(
            loss=loss / divisor,
            grad_norm=norm / divisor,
            balance_loss=balance_loss / divisor,
            num_targets=int(targets),
            counts_LE=counts_LE,
        )

    def _max_of_grads(self) -> float:
        largest = grad_norm.max_abs(self._parameters).to(self._device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.item()


def batch_loss(model: Decoder, batch: Batch, device: torch.device) -> Tensor:
    """Sum of the cross-entropy over a microbatch's target tokens, in at least float32."""
    tokens_BS = batch.tokens_BS.to(device, non_blocking=True)
    positions_BS = torch.arange(tokens_BS.shape[1], device=device).expand_as(tokens_BS)
    logits_BSV = model(tokens_BS, batch.documents_BS.to(device, non_blocking=True), positions_BS)
    return F.cross_entropy(
        logits_BSV.flatten(0, 1).to(torch.promote_types(logits_BSV.dtype, torch.float32)),
        batch.labels_BS.to(device, non_blocking=True).flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )
