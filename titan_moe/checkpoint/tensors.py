"""The tensors of a checkpoint, by name: `model.<fqn>` and `optimizer.<fqn>.<key>`; their memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from titan_moe.distributed.dtensor import detached

MODEL = "model."
OPTIMIZER = "optimizer."


def model_tensors(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Parameters and persistent buffers, detached, sharing memory with the modules.

    Several modules are parts of one model (stages of a pipeline) and name no tensor twice.
    """
    return {MODEL + fqn: detached(tensor) for fqn, tensor in _named_tensors(modules).items()}


def optimizer_tensors(modules: Sequence[nn.Module], optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state, sharing memory with it, named after the model's parameters.

    The optimizer has all of its state before its first step, so that the names do not depend on the
    run's history and a fresh one can be loaded into. Parameter groups are not here: they follow
    from the configuration and the step.

    Raises:
        TypeError: a parameter has no state.
    """
    fqns: dict[Tensor, str] = {}
    for fqn, tensor in _named_tensors(modules).items():
        fqns.setdefault(tensor, fqn)  # A tied parameter goes by its first name.
    result = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                raise TypeError(f"{type(optimizer).__name__} has no state of {fqns[parameter]}")
            for key, value in optimizer.state[parameter].items():
                result[f"{OPTIMIZER}{fqns[parameter]}.{key}"] = value
    return result


def as_array(tensor: Tensor) -> NDArray[Any]:
    """The memory of a CPU tensor of integers, without a copy.

    `Tensor.numpy()` would forbid its storage to be resized from then on, and a change of layout
    gives memory back by that (distributed/transfer.py).
    """
    return np.from_dlpack(tensor)  # type: ignore[arg-type]


def _named_tensors(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    # state_dict() rather than named_parameters(): FSDP2 hooks it to put back sharded parameters,
    # which a forward without a backward (validation) may have left gathered.
    return {
        fqn: value
        for module in modules
        for fqn, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    }
