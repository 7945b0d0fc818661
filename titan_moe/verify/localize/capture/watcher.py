"""Records what passes by in a step, as hooks hand it over."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from titan_moe.verify.localize.capture.records import Laid, Place, Records
from titan_moe.verify.localize.capture.tokens import Microbatch

Lay = Callable[[Tensor], Laid | None]
"""Sketches a tensor; None if it has no keys."""


class Watcher:
    """Records what passes by in one stage of the model, of the microbatch that runs.

    Args:
        stage: which stage of the pipeline; 0 without one.
        microbatch: of the documents that a stage's forward is given, the rows that they are.
        interleaved: whether other forwards run between one and its backward, so that a
            recomputation would not be known by its rows.
    """

    def __init__(
        self,
        records: Records,
        stage: int,
        microbatch: Callable[[Tensor], Microbatch],
        *,
        interleaved: bool,
    ) -> None:
        self.stage = stage
        self._records = records
        self._find = microbatch
        self._interleaved = interleaved
        self._now: Microbatch | None = None
        self._numbers: dict[Place, int] = {}

    @property
    def now(self) -> Microbatch:
        """The microbatch whose forward ran last."""
        assert self._now is not None, "no forward has run"
        return self._now

    def begins(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Notes the rows of a stage's forward before it runs."""
        self._now = self._find(kwargs["documents_BS"])

    def order(self, place: Place) -> tuple[int, int]:
        """Numbers places as a forward comes by them."""
        return self.stage, self._numbers.setdefault(place, len(self._numbers))

    def by_token(self, *, cut: bool = False, gradient: bool = False) -> Lay:
        """Returns the sketch of tensors that have a row for each token of this microbatch."""
        now = self.now
        return lambda x: now.lay(x, cut=cut, gradient=gradient)

    def forward(
        self, module: str, tensor: str, x: Tensor, *, cut: bool = False, lay: Lay | None = None
    ) -> None:
        """Records a tensor, by token unless `lay` says otherwise."""
        phase = "recompute" if recomputing() else "forward"
        if x.is_floating_point() and not (phase == "recompute" and self._interleaved):
            self.keep(Place(phase, module, tensor), x, lay or self.by_token(cut=cut))

    def backward(
        self, module: str, tensor: str, x: Tensor, *, cut: bool = False, lay: Lay | None = None
    ) -> None:
        """Records the gradient of a tensor when it comes."""
        if recomputing() or not x.requires_grad:
            return
        place, lay = Place("backward", module, tensor), lay or self.by_token(cut=cut, gradient=True)
        self.order(place)
        on_gradient(x, lambda grad: self.keep(place, grad, lay))

    def given(
        self, module: str, tensor: str, x: Tensor, *, cut: bool = False, lay: Lay | None = None
    ) -> Tensor:
        """Returns a view of an input for one module, whose gradient is recorded."""
        if not x.requires_grad:
            return x
        view = x.view_as(x)
        self.backward(module, tensor, view, cut=cut, lay=lay)
        return view

    def keep(self, place: Place, x: Tensor, lay: Lay, **beside: Tensor) -> None:
        """Records a tensor that is there."""
        with torch.no_grad(), _disable_current_modes():
            laid = lay(x.detach())
            if laid is not None:
                self._records.add(place, self.order(place), laid, **beside)


def recomputing() -> bool:
    """Tells whether a backward runs, so that a forward in it is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def on_gradient(x: Tensor, keep: Callable[[Tensor], None]) -> None:
    """Call with a tensor's gradient, once: a split backward may come by twice with the same one."""
    seen: list[bool] = []

    def hook(grad: Tensor) -> None:
        if not seen:
            seen.append(True)
            keep(grad)

    x.register_hook(hook)  # type: ignore[no-untyped-call]
