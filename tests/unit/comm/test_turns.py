"""A forward and a backward that take turns: their order, their errors, their thread."""

from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar

import pytest
import torch

from tests.support.operations import Operations
from titan_moe.comm.turns import BACKWARD, FORWARD, Turns

TURNS = Turns(torch.device("cpu"))
WORD = ContextVar("WORD", default="")


def work(log: list[str], own: int, exchanges: int, fails: bool = False) -> Callable[[], None]:
    def run() -> None:
        for number in range(exchanges):
            log.append(f"{'FB'[own]}{number}")
            TURNS.pass_on(own)
        if fails:
            raise ValueError("FB"[own])
        log.append("FB"[own])

    return run


@pytest.mark.parametrize(
    "exchanges, failing, order",
    [
        ((2, 2), None, "F0 B0 F1 B1 F B"),
        ((0, 2), None, "F B0 B1 B"),
        ((3, 1), None, "F0 B0 F1 B F2 F"),
        ((0, 3), FORWARD, ""),
        ((1, 3), FORWARD, "F0 B0"),
        ((3, 0), BACKWARD, "F0"),
        ((3, 1), BACKWARD, "F0 B0 F1"),
        ((1, 2), BACKWARD, "F0 B0 F B1"),
    ],
)
def test_turn_passes_at_each_exchange_and_an_error_ends_both_there(exchanges, failing, order):
    for _ in range(2):  # An object serves many pairs.
        log: list[str] = []
        both = [work(log, own, exchanges[own], own == failing) for own in (FORWARD, BACKWARD)]
        with nullcontext() if failing is None else pytest.raises(ValueError, match="FB"[failing]):
            TURNS.run(*both)
        assert " ".join(log) == order
        TURNS.pass_on(FORWARD)  # Alone again: nothing to wait for, nothing to raise.


def test_backward_has_the_callers_modes_and_variables():
    found: list[str] = []

    def backward() -> None:
        torch.ones(1)
        found.append(WORD.get())

    word = WORD.set("here")
    with Operations() as seen:
        TURNS.run(lambda: None, backward)
    WORD.reset(word)
    assert seen.calls == {"aten.ones": 1} and found == ["here"]
