"""Tracks where in a step a rank is: phase, layer and region, in the backward too."""

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from titan_moe.runtime.position import POSITION
from titan_moe.runtime.regions import NodeMakers, watched_by

_LAYER = re.compile(r"(mtp\.)?layers\.\d+|tok_embeddings|output")
_CHECKPOINT = "/torch/utils/checkpoint.py"
_FSDP = "/torch/distributed/fsdp/"
_PACKAGE = "/titan_moe/"
_NOT_CALLERS = (
    "simulate/",
    "distributed/activation_checkpoint.py",
    "comm/collectives.py",
    "distributed/execution.py",
    "training/train_step.py:_accumulate",
)


class Place(NamedTuple):
    """Names the place in a step where a collective is issued."""

    phase: str
    """"forward", "recomputation", "backward"; outside of a step's layers the run's own, such as
    "start", "step", "validation", "checkpoint"."""
    layer: str
    """A module's name in the whole model; empty outside."""
    region: str
    """One of runtime/regions.py; empty outside."""
    caller: str
    """The function of titan_moe that asked for it, or FSDP."""

    def __str__(self) -> str:
        inside = f"{self.layer}'s {self.region}" if self.layer and self.region else ""
        inside = inside or self.layer or self.region
        return ", ".join(filter(None, (inside, self.phase, self.caller)))


class Whereabouts:
    """Knows where this thread is while `watching`."""

    def __init__(self) -> None:
        self._layer = ""
        self._regions: list[str] = []
        self._makers = NodeMakers()

    @contextmanager
    def watching(self, parts: Iterable[nn.Module]) -> Iterator[None]:
        """Hear when a region or a layer of these models is entered or left."""
        hooks = []
        for part in parts:
            for name, module in part.named_modules():
                if _LAYER.fullmatch(name):
                    hooks += self._hooks(name, module)
        try:
            with watched_by(self._entered):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def now(self) -> Place:
        """Returns the place of the code that calls this method."""
        node = torch._C._current_autograd_node()
        caller, recomputes = _caller(sys._getframe(1))
        region = self._regions[-1] if self._regions else ""
        if node is None:
            phase = POSITION.last().phase or "step"
            if self._layer and phase == "step":
                phase = "forward"
            return Place(phase, self._layer, region, caller)
        layer, made_in = self._makers.of(node)
        if recomputes:
            return Place("recomputation", layer, region, caller)
        return Place("backward", layer, made_in, caller)

    def _hooks(self, name: str, module: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
        # Before FSDP's own hook, whose gathering is then the layer's.
        before = module.register_forward_pre_hook(lambda *_: self._moves(name), prepend=True)
        return [before, module.register_forward_hook(lambda *_: self._moves(""))]

    def _moves(self, layer: str) -> None:
        if torch._C._current_autograd_node() is None:
            self._layer = layer
            self._note()

    @contextmanager
    def _entered(self, region: str) -> Iterator[None]:
        self._regions.append(region)
        self._note()
        try:
            yield
        finally:
            self._regions.pop()
            self._note()

    def _note(self) -> None:
        # The backward runs the nodes of the first forward, not those of a recomputation.
        if torch._C._current_autograd_node() is None:
            self._makers.note(self._layer, self._regions[-1] if self._regions else "")


def _caller(frame) -> tuple[str, bool]:  # type: ignore[no-untyped-def]
    """Returns the function that asked for a collective, and whether it runs in a recomputation."""
    caller, recomputes = "", False
    while frame is not None and not recomputes:
        path, function = frame.f_code.co_filename, frame.f_code.co_name
        if not caller and _FSDP in path:
            caller = "FSDP"
        elif not caller and _PACKAGE in path:
            name = f"{path.rpartition(_PACKAGE)[2]}:{function}"
            if not name.startswith(_NOT_CALLERS):
                caller = name
        recomputes = function == "unpack_hook" and path.endswith(_CHECKPOINT)
        frame = frame.f_back
    return caller, recomputes
