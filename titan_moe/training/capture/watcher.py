"""Records what passes by in a step, as hooks hand it over."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from titan_moe.comm.collectives import recomputing
from titan_moe.training.capture.records import TOKENS, Place, Records, Sketches, token_keys
from titan_moe.training.capture.sketch import sketch_rows

Lay = Callable[[Tensor, bool], Sketches | None]
"""Sketches a tensor or, if told so, a gradient of its shape; None for one whose rows have no
keys."""


class Microbatch:
    """The sequences of one forward, as this rank reads them.

    Args:
        names_B: each sequence's fingerprint.
        positions_S: the positions that this rank reads of each.
        tp, tp_rank: tensor parallelism: outside of attention and feed-forwards a rank holds its
            consecutive chunk of these positions, inside all of them.
    """

    def __init__(self, names_B: Tensor, positions_S: Tensor, tp: int, tp_rank: int) -> None:
        self.size, self._tp_rank = len(names_B), tp_rank
        self._keys_BS = token_keys(names_B, positions_S)
        by_rank = self._keys_BS.chunk(tp, 1)
        self._own_keys_BS = by_rank[tp_rank]
        # Gathered tokens without a dim of sequences lie rank after rank.
        self._gathered_keys_T = torch.cat([keys_BS.flatten() for keys_BS in by_rank])

    def lay(
        self, x: Tensor, gradient: bool, *, of: Callable[[Tensor], Tensor], cut: bool
    ) -> Sketches | None:
        """Sketches of a tensor [B, S, ...] or [T, F]; None for one that is not by token.

        Args:
            gradient: True for a gradient, of which a tp rank with all columns has one summand.
            of: makes what is sketched of the tensor.
            cut: whether each tp rank has its columns of it, if it has all tokens of it.
        """
        x, all_T, own_T = of(x), self._gathered_keys_T, self._own_keys_BS.flatten()
        if x.ndim > 2:
            if x.shape[:2] not in (self._own_keys_BS.shape, self._keys_BS.shape):
                return None
            x, all_T = x.flatten(0, 1), self._keys_BS.flatten()
        if x.ndim < 2 or len(x) not in (len(own_T), len(all_T)):
            return None
        x_TF = x.flatten(1)
        if len(x) == len(own_T):
            return Sketches(TOKENS, own_T, sketch_rows(x_TF))
        first = self._tp_rank * x_TF.shape[1] if cut else 0
        summand = first if cut else self._tp_rank * gradient
        return Sketches(TOKENS, all_T, sketch_rows(x_TF, first), summand)


class Watcher:
    """Records what passes by in one stage of the model, of the microbatch that runs.

    Args:
        stage: which stage of the pipeline; 0 without one.
        microbatch: of the documents that a stage's forward is given, the sequences that they are.
        interleaved: whether other forwards run between one and its backward, so that a
            recomputation would not be known by its sequences.
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
        self.now: Microbatch
        """The microbatch whose forward ran last."""

    def begins(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Notes the sequences of a stage's forward before it runs."""
        self.now = self._find(kwargs["documents_BS"])

    def by_token(self, of: Callable[[Tensor], Tensor] = lambda x: x, *, cut: bool = False) -> Lay:
        """Returns the sketch of tensors that have a row for each token of this microbatch (see
        `Microbatch.lay`)."""
        return partial(self.now.lay, of=of, cut=cut)

    def forward(self, module: str, tensor: str, x: Tensor, lay: Lay) -> None:
        """Records a tensor that a module's forward reads or returns."""
        phase = "recompute" if recomputing() else "forward"
        if x.is_floating_point() and not (phase == "recompute" and self._interleaved):
            self._keep(Place(phase, module, tensor), x, lay, gradient=False)

    def given(self, module: str, tensor: str, x: Tensor, lay: Lay) -> Tensor:
        """Returns a view of an input for one module, whose gradient is recorded."""
        if not x.requires_grad:
            return x
        view = x.view_as(x)
        if recomputing():
            return view
        place = Place("backward", module, tensor)
        self._records.expect(place, self.stage)
        seen: list[bool] = []

        def keep(grad: Tensor) -> None:
            if not seen:  # A split backward may come by twice with the same gradient.
                seen.append(True)
                self._keep(place, grad, lay, gradient=True)

        view.register_hook(keep)  # type: ignore[no-untyped-call]
        return view

    def _keep(self, place: Place, x: Tensor, lay: Lay, *, gradient: bool) -> None:
        with torch.no_grad(), _disable_current_modes():
            sketches = lay(x.detach(), gradient)
            if sketches is not None:
                self._records.add(place, self.stage, sketches)
