"""Names the place of an event in the program, and lists the places where it may happen."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

_OURS = f"{Path(__file__).resolve().parents[2] / 'titan_moe'}/"
_FSDP = "/torch/distributed/fsdp/_fully_shard/"
_FSDP_PATH = _FSDP.removeprefix("/")
# An event belongs to the caller of these helpers, and of loops that Python runs as functions.
_LOOPS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
_HELPERS = {
    ("comm/collectives.py", "to_host"),
    ("distributed/activation_checkpoint.py", "__torch_dispatch__"),
}


class Place(NamedTuple):
    """A function of titan_moe; if none is running, of FSDP or a node of the backward."""

    where: str
    """"moe/layer.py:choose"; "torch/distributed/fsdp/..."; or "backward of NODE"."""
    line: int = 0

    def __str__(self) -> str:
        path, _, function = self.where.partition(":")
        if not function:
            return self.where
        folder = "" if path.startswith("torch/") else "titan_moe/"
        return f"{folder}{path}:{self.line} ({function})"


class Allowance(NamedTuple):
    """The reason why the host may wait at a place, and how often."""

    reason: str
    times: str = "step"
    """Number of waits: one a "step"; one a "layer", for each MoE layer and microbatch; one a
    "parameter"; one a "mask"; or one a "schedule" and stage. Only the first two are counted."""


COPIES: Mapping[str, str] = {
    "training/train_step.py:local_batch": "a microbatch's tensors, not waited for",
    "distributed/pipeline/schedule.py:_run": "stages agree how a schedule of torch's begins",
    # These need CPU offload.
    f"{_FSDP_PATH}_fsdp_param.py:all_gather_inputs": "offloaded parameters that are gathered",
    f"{_FSDP_PATH}_fsdp_collectives.py:foreach_reduce": "gradients of offloaded parameters",
    "distributed/tensor_parallel.py:sum_grads": "offloaded gradients, summed by the devices",
    "training/train_step.py:_total": "the sum of offloaded gradients' squares",
}
"""Copies between host and device in a step: place -> reason."""

_SIZES = Allowance("collectives of rows take their sizes as Python ints", "layer")
WAITS: Mapping[str, Allowance] = {
    "comm/collectives.py:read": Allowance("whether to update is decided on a step's sums"),
    "distributed/context_parallel/blocks.py:_block": Allowance(
        "explicit masks are cut, for heads and types that flex attention does not take", "mask"
    ),
    "distributed/pipeline/schedule.py:_run": Allowance(
        "stages agree how a schedule of torch's begins, in its first run", "schedule"
    ),
    "moe/dispatch/all_to_all.py:plan": _SIZES,
    "moe/dispatch/balanced.py:_plan": _SIZES,
    "moe/dispatch/deduplicated.py:plan": _SIZES,
    # These need CPU offload.
    f"{_FSDP_PATH}_fsdp_param_group.py:finalize_backward": Allowance(
        "the optimizer reads offloaded gradients on the host", "parameter"
    ),
    "distributed/tensor_parallel.py:sum_grads": Allowance(
        "offloaded gradients go to the device and back"
    ),
    "training/train_step.py:_total": Allowance("the sum of offloaded gradients' squares"),
}
"""Waits of the host for the device in a step."""


def here() -> Place:
    """Returns the innermost running function of titan_moe or FSDP, else the backward's node."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if (where := place_of(code.co_filename, code.co_name)) is not None:
            return Place(where, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    node = torch._C._current_autograd_node()
    return Place("torch" if node is None else f"backward of {node.name()}")


def place_of(filename: str, function: str) -> str | None:
    """Returns the name of a function in these tables; None for one that is no place."""
    if _FSDP in filename:
        return f"{_FSDP_PATH}{filename.rpartition(_FSDP)[2]}:{function}"
    path = filename.removeprefix(_OURS)
    if path == filename or path.startswith("simulate/"):
        return None
    if (path, function) in _HELPERS or function in _LOOPS:
        return None
    return f"{path}:{function}"
