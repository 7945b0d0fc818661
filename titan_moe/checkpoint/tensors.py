"""The tensors of a checkpoint, by name: `model.<fqn>` and `optimizer.<fqn>.<key>`."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.optimizer import _get_scalar_dtype

MODEL = "model."
OPTIMIZER = "optimizer."


@runtime_checkable
class HasZeroState(Protocol):
    """An optimizer that knows what its state is before the first update."""

    def zero_state(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]: ...


def model_tensors(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Parameters and persistent buffers, detached, sharing memory with the modules.

    Several modules are parts of one model (stages of a pipeline) and name no tensor twice.
    """
    return {MODEL + fqn: tensor.detach() for fqn, tensor in _named_tensors(modules).items()}


def optimizer_tensors(modules: Sequence[nn.Module], optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state, sharing memory with it, named after the model's parameters.

    State that does not exist yet (before the first step, or for a parameter that never had a
    gradient) is created as zeros, as torch's own first step would: the names then do not depend on
    the run's history, and a fresh optimizer can be loaded into. Parameter groups are not here: they
    follow from the configuration and the step.
    """
    fqns: dict[Tensor, str] = {}
    for fqn, tensor in _named_tensors(modules).items():
        fqns.setdefault(tensor, fqn)  # A tied parameter goes by its first name.
    result = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = _zero_state(optimizer, group, parameter)
            for key, value in optimizer.state[parameter].items():
                result[f"{OPTIMIZER}{fqns[parameter]}.{key}"] = value
    return result


def _named_tensors(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    # state_dict() rather than named_parameters(): FSDP2 hooks it to put back sharded parameters,
    # which a forward without a backward (validation) may have left gathered.
    return {
        fqn: value
        for module in modules
        for fqn, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    }


def _zero_state(
    optimizer: Optimizer, group: dict[str, Any], parameter: Tensor
) -> dict[str, Tensor]:
    if isinstance(optimizer, HasZeroState):
        return optimizer.zero_state(group, parameter)
    if not isinstance(optimizer, Adam):
        raise TypeError(f"cannot create the initial state of {type(optimizer).__name__}")
    keys = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]
    on_device = group["fused"] or group["capturable"]
    step = torch.zeros(
        (),
        dtype=_get_scalar_dtype(is_fused=group["fused"]),  # type: ignore[no-untyped-call]
        device=parameter.device if on_device else "cpu",
    )
    zeros = {key: torch.zeros_like(parameter, memory_format=torch.preserve_format) for key in keys}
    return {"step": step, **zeros}
