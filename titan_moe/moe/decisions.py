"""Decisions of a forward pass that its recomputation repeats."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from torch import nn

Given = TypeVar("Given")
Decision = TypeVar("Decision")


class DecisionMemo(nn.Module):
    """Replays the decisions of a checkpointed forward pass in its recomputation: the routing of a
    layer, or the keys that its attention sees.

    Routing anew could send a token elsewhere (rounding), would count it again, and would wait for
    split sizes again. Outside the two contexts of `contexts` every decision is made anew. A module,
    so that activation checkpointing finds it in a block.
    """

    def __init__(self) -> None:
        super().__init__()
        self._recorded: list[Any] | None = None
        self._replayed: Iterator[Any] | None = None

    def contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        """Returns a context for a forward pass, which records decisions, and one for its
        recomputation, which replays them in the same order."""
        decisions: list[Any] = []
        return self._within(decisions, None), self._within(None, iter(decisions))

    def decide(self, choose: Callable[[Given], Decision], given: Given) -> Decision:
        """`choose(given)`, or in a recomputation what that returned in the forward pass."""
        if self._replayed is not None:
            return next(self._replayed)
        decision = choose(given)
        if self._recorded is not None:
            self._recorded.append(decision)
        return decision

    @contextmanager
    def _within(self, recorded: list[Any] | None, replayed: Iterator[Any] | None) -> Iterator[None]:
        self._recorded, self._replayed = recorded, replayed
        try:
            yield
        finally:
            self._recorded = self._replayed = None
