"""Where in the program something happens, and the places where it may."""

import sys
from collections.abc import Mapping
from typing import NamedTuple

import torch

_OURS, _TORCH = "/titan_moe/", "/torch/"
# Who asks is the place, not these helpers of theirs.
_HELPERS = {("distributed/collectives.py", "to_host")}
_NO_PROGRAM = ("simulate/",)


class Place(NamedTuple):
    """A function of titan_moe, or what stands for one where none is running."""

    where: str
    """"moe/layer.py:route" of titan_moe; "torch/..." of a file of torch's; "backward of NODE"."""
    line: int = 0

    def __str__(self) -> str:
        path, _, function = self.where.partition(":")
        return f"titan_moe/{path}:{self.line} ({function})" if function else self.where


class Allowance(NamedTuple):
    """Why something may happen at a place."""

    reason: str
    per_moe_layer: bool = False
    """Once per MoE layer and microbatch, instead of once per step."""


COPIES: Mapping[str, str] = {
    "train_step.py:local_batch": "a microbatch's tokens, not waited for",
}
"""Copies between host and device in a step: place -> reason."""

WAITS: Mapping[str, Allowance] = {
    "distributed/collectives.py:read": Allowance("whether to update is decided on a step's sums"),
    "moe/dispatch/all_to_all.py:_route": Allowance(
        "collectives of rows take their sizes as Python ints", per_moe_layer=True
    ),
    "moe/dispatch/deduplicated.py:_route": Allowance(
        "collectives of rows take their sizes as Python ints", per_moe_layer=True
    ),
}
"""Waits of the host for the device in a step."""

FIRST_PAIRS: Mapping[str, str] = {
    "distributed/context_parallel/ring.py:_pass_on": "every rank of the ring sends and receives",
}
"""Batches of sends and receives that may be a group's first use: all of its ranks take part."""


def here() -> Place:
    """The innermost function of titan_moe that is running; else the backward's node, or torch's
    outermost function that is not a module's call."""
    frame, torchs = sys._getframe(1), None
    while frame is not None:
        name = frame.f_code.co_filename
        if _OURS in name:
            path = name.rpartition(_OURS)[2]
            if (path, frame.f_code.co_name) not in _HELPERS and not path.startswith(_NO_PROGRAM):
                return Place(f"{path}:{frame.f_code.co_name}", frame.f_lineno)
        elif torchs is None and "/torch/distributed/" in name:
            torchs = f"torch/{name.rpartition(_TORCH)[2]} ({frame.f_code.co_name})"
        frame = frame.f_back  # type: ignore[assignment]
    if torchs is not None:
        return Place(torchs)
    node = torch._C._current_autograd_node()
    return Place(f"backward of {node.name()}" if node is not None else "torch")
