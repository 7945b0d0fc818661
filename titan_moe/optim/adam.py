"""Adam and AdamW over this rank's parts, with moments in the type that is asked for."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from titan_moe.config.job_config import Optimizer
from titan_moe.distributed.dtensor import local_part

# Elements whose moments are widened together: 64 MiB in float32.
_WIDENED_TOGETHER = 2**23


class Adam(torch.optim.Optimizer):
    """Adam (arXiv 1412.6980), or AdamW (arXiv 1711.05101) where the decay is decoupled.

    The arithmetic is torch's own, on plain tensors: torch.optim.AdamW sends DTensors through their
    dispatch, which takes several times as long as the update of small parameters. State has torch's
    names, shapes and placements, and is there from the start, in zeros: checkpoints hold the same
    tensors whatever has been trained so far.

    Moments of another type than the parameters' are widened for the arithmetic, some at a time, and
    rounded to nearest where they are kept. In bfloat16 a moment moves by half a unit in the last
    place, 1/512 to 1/256 of itself, or not at all: (1 - beta) must be well above that.

    Args:
        groups: with a "name", a "kind" and a "peak_lr" each; may override lr and weight_decay.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], config: Optimizer) -> None:
        how = {name: config.implementation == name for name in ("fused", "foreach")}
        betas = config.beta1, config.beta2
        defaults = {"lr": config.lr, "betas": betas, "eps": config.eps, "weight_decay": 0.0, **how}
        super().__init__(groups, defaults)
        self._decoupled = config.name != "Adam"
        self._how = how
        # Else as the parameter.
        self._state_dtype = torch.bfloat16 if config.state_dtype == "bfloat16" else None
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self.initial_state(group, parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            self.update(group, [each for each in group["params"] if each.grad is not None])

    def update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Update some of a group's parameters, all with gradients."""
        limit = math.inf if self._state_dtype is None else _WIDENED_TOGETHER
        for some in _chunks(parameters, limit):
            kept = [self.moments(some, key) for key in ("exp_avg", "exp_avg_sq")]
            wide = first, second = [self.widened(some, moments) for moments in kept]
            beta1, beta2 = group["betas"]
            adam(
                [local_part(each) for each in some],
                [local_part(each.grad) for each in some],  # type: ignore[arg-type]
                first,
                second,
                max_exp_avg_sqs=[],
                state_steps=[self.state[each]["step"] for each in some],
                decoupled_weight_decay=self._decoupled,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                fused=self._how["fused"],
                foreach=self._how["foreach"],
            )
            for moments, widened in zip(kept, wide, strict=True):
                self.put_back(moments, widened)

    def initial_state(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        """Returns a parameter's state before its first update."""
        device = parameter.device if self._how["fused"] else "cpu"
        step = torch.zeros((), dtype=torch.float32, device=device)
        moments = {key: self.zeros(parameter) for key in ("exp_avg", "exp_avg_sq")}
        return {"step": step, **moments}

    def zeros(self, parameter: Tensor) -> Tensor:
        """Returns zeros for a moment, laid out as its parameter is."""
        return torch.zeros_like(parameter, dtype=self._state_dtype or parameter.dtype)

    def moments(self, parameters: list[Tensor], key: str) -> list[Tensor]:
        """This rank's parts of the parameters' moments of one kind."""
        return [local_part(self.state[parameter][key]) for parameter in parameters]

    def widened(self, parameters: list[Tensor], moments: list[Tensor]) -> list[Tensor]:
        """The moments in their parameters' type: themselves, where they have it."""
        pairs = zip(moments, parameters, strict=True)
        return [moment.to(parameter.dtype) for moment, parameter in pairs]

    def put_back(self, moments: list[Tensor], widened: list[Tensor]) -> None:
        """Copies updated moments into the stored ones, unless they are the same tensors."""
        if moments and moments[0] is not widened[0]:
            torch._foreach_copy_(moments, widened)


def _chunks(parameters: list[Tensor], limit: float) -> Iterator[list[Tensor]]:
    """Yields consecutive parameters: `limit` elements on this rank at most, or a single one."""
    some: list[Tensor] = []
    size = 0
    for parameter in parameters:
        own = local_part(parameter).numel()
        if some and size + own > limit:
            yield some
            some, size = [], 0
        some.append(parameter)
        size += own
    if some:
        yield some
