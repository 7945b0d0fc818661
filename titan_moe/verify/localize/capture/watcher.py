"""Records what passes by in a step, as hooks hand it over."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from titan_moe.verify.localize.capture.records import Place, Records
from titan_moe.verify.localize.capture.tokens import Microbatch


class Watcher:
    """Records what passes by in one stage of the model, of the microbatch that runs.

    Args:
        stage: which stage of the pipeline; 0 without one.
        microbatch: of the documents that a stage's forward is given, the rows that they are.
        interleaved: whether other forwards run between one and its backward, so that a
            recomputation would not be known by its rows.

    Until `active` is cleared: what was put in a strategy's place (`watched`) then passes calls on.
    """

    def __init__(
        self,
        records: Records,
        stage: int,
        microbatch: Callable[[Tensor], Microbatch],
        *,
        interleaved: bool,
    ) -> None:
        self.records = records
        self.stage = stage
        self._find = microbatch
        self._interleaved = interleaved
        self.active = True
        self.now: Microbatch | None = None
        self._numbers: dict[Place, int] = {}

    def begins(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Before the stage's forward: which rows it is about."""
        self.now = self._find(kwargs["documents_BS"])

    def watched(self, plain: Callable[..., Any], seen: Callable[..., Any]) -> Callable[..., Any]:
        """A strategy to take the place of `plain`: `seen` while this watcher is active."""
        return lambda *args: (seen if self.active else plain)(*args)

    def order(self, place: Place) -> tuple[int, int]:
        """Places are numbered as a forward comes by them."""
        return self.stage, self._numbers.setdefault(place, len(self._numbers))

    @property
    def phase(self) -> str | None:
        """The kind of this forward; None for one to be passed over."""
        if not recomputing():
            return "forward"
        return None if self._interleaved else "recompute"

    def forward(self, module: str, tensor: str, x: Tensor, *, cut: bool = False) -> None:
        """Record a tensor by token."""
        if self.phase is None or not x.is_floating_point():
            return
        assert self.now is not None
        place = Place(self.phase, module, tensor)
        self.keep(place, self.now, x, cut=cut, gradient=False)

    def keep(self, place: Place, now: Microbatch, x: Tensor, *, cut: bool, gradient: bool) -> None:
        """Record a tensor that is there, by token; nothing if it has no tokens."""
        with torch.no_grad(), _disable_current_modes():
            laid = now.lay(x.detach(), cut=cut, gradient=gradient)
            if laid is not None:
                order, (keys, part, values, kind) = self.order(place), laid
                self.records.add(place, kind, order, keys=keys, part=part, values=values)

    def backward(self, module: str, tensor: str, x: Tensor, *, cut: bool = False) -> None:
        """Record, when it comes, the gradient of a tensor by token."""
        if recomputing() or not x.requires_grad:
            return
        place, now = Place("backward", module, tensor), self.now
        assert now is not None
        self.order(place)
        on_gradient(x, lambda grad: self.keep(place, now, grad, cut=cut, gradient=True))

    def given(self, module: str, tensor: str, x: Tensor, *, cut: bool = False) -> Tensor:
        """A view of an input for one module, whose gradient is recorded."""
        if not x.requires_grad:
            return x
        view = x.view_as(x)
        self.backward(module, tensor, view, cut=cut)
        return view


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
