"""A log of who computes and who communicates when, for tests of overlap: run inside of ranks."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Event(NamedTuple):
    what: str
    """ "start" or "wait" of an exchange of rows, or what was marked or gathered."""
    phase: str
    """ "forward" or "backward", by what autograd does in this thread."""
    flight: int = -1
    """Which exchange."""


@dataclass
class Log:
    """Events in the order in which this process's threads issued them."""

    events: list[Event] = field(default_factory=list)
    flights: dict[int, int] = field(default_factory=dict)

    def watch_exchanges(self) -> None:
        """Log starts and waits of all exchanges of rows, for the rest of this process."""
        from titan_moe.distributed import collectives

        start, wait = collectives.AllToAll.start, collectives.AllToAll.wait

        def started(exchange: Any, x_RD: Tensor) -> Tensor:
            out_RD = start(exchange, x_RD)
            flight = self.flights[out_RD.untyped_storage()._cdata] = len(self.events)
            self.events.append(Event("start", phase(), flight))
            return out_RD

        def waited(exchange: Any, x_RD: Tensor) -> Tensor:
            flight = self.flights.pop(x_RD.untyped_storage()._cdata)
            self.events.append(Event("wait", phase(), flight))
            return wait(exchange, x_RD)

        collectives.AllToAll.start, collectives.AllToAll.wait = started, waited  # type: ignore

    def mark_now(self, name: str) -> None:
        self.events.append(Event(name, phase()))

    def seen(self, x: Tensor, name: str) -> Tensor:
        """x, whose gradient's arrival is logged."""
        return _Seen.apply(x, self, name) if x.requires_grad else x

    def mark(self, module: nn.Module, name: str) -> None:
        """Log when a module that returns a tensor begins to compute, in either direction."""
        module.register_forward_pre_hook(lambda module, args: self.mark_now(name))
        module.register_forward_hook(lambda module, args, output: self.seen(output, name))

    def inside(self) -> list[tuple[Event, list[Event]]]:
        """Each exchange, and what happened between its start and its wait."""
        found = []
        for place, event in enumerate(self.events):
            if event.what == "start":
                rest = self.events[place + 1 :]
                end = next(n for n, e in enumerate(rest) if e.flight == event.flight)
                found.append((event, rest[:end]))
        return found


def phase() -> str:
    return "forward" if torch._C._current_graph_task_id() == -1 else "backward"


class _Seen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, log: Log, name: str) -> Tensor:
        ctx.seen = log, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        log, name = ctx.seen
        log.mark_now(name)
        return grad, None, None
