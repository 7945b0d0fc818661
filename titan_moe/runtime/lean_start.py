"""Start without torch's compiler, where nothing else wants it.

torch keeps its compiler out of some functions by a wrapper that imports the compiler at the first
call, to tell it so: 0.5 s and 100 MB of a run on one rank, which compiles nothing. (FSDP asks
DTensor for the shapes of operations, which imports it in any case.) The wrapper asks an attribute
of the function first (torch/_compile.py, 2.11 to 2.13). A torch that does not ask it any more
imports its compiler again; nothing else changes.
"""

from collections.abc import Callable
from typing import Any

import torch

_WRAPPED: tuple[Callable[..., Any], ...] = (
    torch.optim.Optimizer.add_param_group,
    torch.optim.Optimizer.zero_grad,
    torch.optim.Optimizer.state_dict,
    torch.optim.Optimizer.load_state_dict,
)


def leave_compiler_out() -> None:
    """Let these functions run as they are; for processes that compile nothing around them."""
    for wrapper in _WRAPPED:
        function = getattr(wrapper, "__wrapped__", None)
        if function is not None:
            function.__dynamo_disable = function
