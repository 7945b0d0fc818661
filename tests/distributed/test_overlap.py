"""Work is issued in an order that lets it overlap: shared experts beside rows, parts of a batch
beside others, a unit beside the gathering of the next one's parameters.

The tests read logs of the order of issue. They measure no time.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.tiers import tiered
from tests.support.tiny import batch_of, make_job, tiny, tiny_step
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.training.train_step import local_batch


class Event(NamedTuple):
    what: str
    """ "start" or "wait" of an exchange of rows, or the name of a mark or of a gathered unit."""
    phase: str
    """ "forward" or "backward", by what autograd does in this thread."""
    flight: int = -1
    """Number of the exchange."""


@dataclass
class Log:
    """Events in the order in which this process's threads issued them."""

    events: list[Event] = field(default_factory=list)
    flights: dict[int, int] = field(default_factory=dict)

    def watch_exchanges(self, name: Callable[[str, Tensor], str] = lambda what, x: what) -> None:
        """Log starts and waits of all exchanges, for the rest of this process, by their names."""
        from titan_moe.comm import collectives

        start, wait = collectives.AllToAll.start, collectives.AllToAll.wait

        def started(exchange: Any, x_RD: Tensor) -> Tensor:
            out_RD = start(exchange, x_RD)
            flight = self.flights[out_RD.untyped_storage()._cdata] = len(self.events)
            self.events.append(Event(name("start", x_RD), phase(), flight))
            return out_RD

        def waited(exchange: Any, x_RD: Tensor) -> Tensor:
            flight = self.flights.pop(x_RD.untyped_storage()._cdata)
            self.events.append(Event(name("wait", x_RD), phase(), flight))
            return wait(exchange, x_RD)

        collectives.AllToAll.start, collectives.AllToAll.wait = started, waited  # type: ignore

    def mark_now(self, name: str) -> None:
        self.events.append(Event(name, phase()))

    def mark(self, module: nn.Module, name: str) -> None:
        """Log when a module that returns a tensor begins to compute, in either direction."""
        module.register_forward_pre_hook(lambda module, args: self.mark_now(name))
        module.register_forward_hook(lambda module, args, output: self._mark_gradient(output, name))

    def _mark_gradient(self, x: Tensor, name: str) -> None:
        if x.requires_grad:
            x.register_hook(lambda grad: self.mark_now(name))

    def inside(self, other: bool = False) -> list[tuple[str, list[str]]]:
        """Returns the phase of each exchange and the events between its start and its wait; with
        `other` only events of the other phase."""
        found = []
        for place, event in enumerate(self.events):
            if event.what == "start":
                rest = self.events[place + 1 :]
                end = next(n for n, e in enumerate(rest) if e.flight == event.flight)
                among = [e for e in rest[:end] if not other or e.phase != event.phase]
                found.append((event.phase, [e.what for e in among]))
        return found


def phase() -> str:
    return "forward" if torch._C._current_graph_task_id() == -1 else "backward"


# --- shared experts, or those of one half of a microbatch, beside rows ---


def build(tables: dict, family: str = "deepseek_v3", num_layers: int = 3):
    job = make_job(family, **tables)
    sharded, _ = tiny_step(job, replace(tiny(job), num_layers=num_layers))
    return sharded


def train_once(sharded, reader: int | None = None, rows: int = 1) -> None:
    """One run on the rows of a reader, by default of this rank's number."""
    first = rows * (dist.get_rank() if reader is None else reader)
    batch = batch_of(0, slice(first, first + rows))
    sharded.execution.accumulate(local_batch(batch, sharded))


def log_of_a_step(
    module: str, overlap: bool = False, recompute: str = "none", planted: bool = False
) -> list[tuple[str, list[str]]]:
    """Returns the phase of each exchange of rows or weights, and the work that was issued
    meanwhile; `module` of each MoE layer is marked."""
    if overlap:  # Otherwise the log's own marks are views.
        warnings.filterwarnings("error", message=".*view tensor")
    degrees = {"expert_parallel_degree": 2, "expert_parallel_overlap": overlap}
    sharded = build({"parallelism": degrees, "activation_checkpoint": {"mode": recompute}})
    log = Log()
    log.watch_exchanges()
    for moe in sharded.moe_layers().values():
        log.mark(moe.get_submodule(module), module)
        if planted:
            _wait_at_once(moe.dispatcher)
    train_once(sharded)
    return log.inside()


def _wait_at_once(dispatcher) -> None:
    """The serial order: rows have arrived before anything else is begun."""
    send, order, receive = dispatcher.send, dispatcher.order, dispatcher.receive

    def send_and_receive(x_TD: Tensor, weights_TK: Tensor, route: Any) -> Any:
        sent = send(x_TD, weights_TK, route)
        order(route)
        return receive(sent, route)

    dispatcher.send, dispatcher.order = send_and_receive, lambda route: None
    dispatcher.receive = lambda received, route: received


_BOTH_TRAVEL = 2 * 2
"""Tokens and their weights, in each of two layers."""
_ONE_HALF = 2 * 3
"""In each of two layers the second half's rows and their weights on the way to the experts, and the
first half's outputs on the way back; in the backward the gradients of the same three."""


@pytest.mark.parametrize(
    "module, options, forward, backward",
    tiered(
        [
            ("shared_experts", {}, _BOTH_TRAVEL, _BOTH_TRAVEL),
            ("shared_experts", {"planted": True}, 0, 0),
            ("experts.compute", {"overlap": True}, _ONE_HALF, _ONE_HALF),
            ("experts.compute", {}, 0, 0),
        ],
        # A recomputation counts as the backward.
        slow=[("shared_experts", {"recompute": "full"}, _BOTH_TRAVEL, 2 * _BOTH_TRAVEL)],
    ),
)
def test_rows_travel_while_shared_experts_or_the_experts_of_the_other_half_compute(
    module: str, options: dict, forward: int, backward: int
):
    for flights in run_on_ranks(partial(log_of_a_step, **options), 2, module):
        beside = [phase for phase, inside in flights if module in inside]
        assert (beside.count("forward"), beside.count("backward")) == (forward, backward)


def rows_beside_loans(recompute: str) -> list[int]:
    """Returns for each exchange of lent weights, forward and recomputed, how many exchanges of rows
    are waited for while they travel."""
    from titan_moe.debug.routing_trace import router_loads

    keys = {"expert_parallel_degree": 2, "expert_parallel_comm_backend": "balanced"}
    # One rank gets no row.
    tables = {"parallelism": keys, "debug": {"router_load": "W5"}}
    sharded = build(tables | {"activation_checkpoint": {"mode": recompute}})
    assert router_loads(sharded) and sharded.config.moe
    dim, log = sharded.config.dim, Log()
    widths = {dim: "rows", dim * sharded.config.moe.hidden_dim: "loan"}
    log.watch_exchanges(lambda what, x: f"{what} {widths.get(x.shape[-1], 'others')}")
    train_once(sharded)
    ends = {e.flight: place for place, e in enumerate(log.events) if e.what.startswith("wait")}
    starts = {e.flight: place for place, e in enumerate(log.events) if e.what == "start loan"}
    beside = [log.events[place + 1 : ends[flight]] for flight, place in starts.items()]
    # Gradients come home one by one.
    return [sum(e.what == "wait rows" for e in events) for events in beside if events]


@pytest.mark.parametrize(("recompute", "times"), [("none", 1), ("full", 2)])
def test_weights_of_lent_experts_travel_while_rows_do(recompute: str, times: int) -> None:
    for seen in run_on_ranks(rows_beside_loans, 2, recompute):
        assert seen == [1] * 3 * 2 * times  # Of each matrix, in two layers.


# --- the order of issue in a layer ---

DIM = 8


def order_of_a_layer() -> tuple[list[str], list[str]]:
    """Returns what one layer issues, forward and backward."""
    from titan_moe.distributed.expert_parallel import apply_expert_parallel
    from titan_moe.distributed.parallel_dims import ParallelDims
    from titan_moe.models.feed_forward import FeedForward
    from titan_moe.moe.config import DispatchOptions, MoEConfig
    from titan_moe.moe.dispatch import all_to_all
    from titan_moe.moe.layer import MoE

    layer = MoE(DIM, MoEConfig(num_experts=4, top_k=2, hidden_dim=4), FeedForward(DIM, 4))
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    meshes = ParallelDims(2, ep=2).build_mesh("cpu")
    apply_expert_parallel([layer], meshes, DispatchOptions())
    log = Log()
    log.watch_exchanges(_named)
    log.mark(layer.shared_experts, "shared experts")
    log.mark(layer.experts.compute, "experts")
    for owner, name, what in (
        (all_to_all, "copy_rows", "gather"),
        (layer.dispatcher, "order", "order"),
    ):
        setattr(owner, name, partial(_marked_call, log, what, getattr(owner, name)))
    layer(torch.randn(1, 6, DIM, requires_grad=True)).sum().backward()
    both = ([e.what for e in log.events if e.phase == p] for p in ("forward", "backward"))
    return _outputs_named(next(both), last=True), _outputs_named(next(both), last=False)


def _named(what: str, x: Tensor) -> str:
    kind = "rows" if x.is_floating_point() else "counts"
    kind = "weights" if kind == "rows" and x.shape[1] == 1 else kind
    return f"{what} {kind}" if what == "start" else f"wait for {kind}"


def _marked_call(log: Log, name: str, call, *args):
    log.mark_now(name)
    return call(*args)


def _outputs_named(events: list[str], *, last: bool) -> list[str]:
    """Names the rows that travel home, the last or the first of an order, by what they are."""
    for what in ("start rows", "wait for rows"):
        places = [place for place, event in enumerate(events) if event == what]
        events[places[-1 if last else 0]] = what.replace("rows", "outputs")
    return events


def test_a_layer_issues_its_work_in_the_order_of_the_table():
    from titan_moe.moe.dispatch import all_to_all

    lines = [line.split("|")[1:3] for line in all_to_all.__doc__.splitlines() if "|" in line][2:]
    forward, backward = ([row[column].strip() for row in lines] for column in (0, 1))
    for seen in run_on_ranks(order_of_a_layer, 2):
        assert seen == (forward, [each for each in reversed(backward) if each])


# --- a forward beside another chunk's backward ---

# A run of the schedule has so many pairs, on either rank of the pipeline.
MICROBATCHES, LAYERS_OF_A_STAGE, PAIRS = 4, 2, 3


def logs_of_pairs() -> tuple[Log, Log, bool]:
    """Logs of a run with the overlap and without; whether their gradients have the same bits."""
    log = Log()
    log.watch_exchanges()
    gradients = run_pairs(log, overlap=True)
    overlapped, log.events = Log(log.events), []
    pairs = zip(gradients, run_pairs(log, overlap=False), strict=True)
    return overlapped, log, all(torch.equal(*pair) for pair in pairs)


def run_pairs(log: Log, overlap: bool) -> list[Tensor]:
    degrees = {
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "DualPipeV",
        "pipeline_parallel_expert_parallel_overlap": overlap,
        "expert_parallel_degree": 2,
    }
    tables = {"parallelism": degrees, "training": {"local_batch_size": MICROBATCHES}}
    sharded = build(tables, "qwen3", num_layers=4 * LAYERS_OF_A_STAGE)
    for moe in sharded.moe_layers().values():
        log.mark(moe.experts.compute, "experts")
    train_once(sharded, reader=dist.get_rank() % 2, rows=MICROBATCHES)
    return [parameter.grad.to_local() for _, parameter in sharded.named_parameters()]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.13 splits the models' backward")
def test_dualpipev_exchanges_rows_of_one_chunk_while_experts_compute_the_other():
    ranks = run_on_ranks(logs_of_pairs, 4)
    for overlapped, serial, same_gradients in ranks:
        # Of each layer the outputs, and the gradients of the outputs.
        beside = [phase for phase, inside in overlapped.inside(other=True) if "experts" in inside]
        assert beside.count("forward") == beside.count("backward") == PAIRS * LAYERS_OF_A_STAGE
        assert not any(inside for _, inside in serial.inside(other=True))
        assert len(overlapped.events) == len(serial.events) and same_gradients
    for first, second in ((0, 1), (2, 3)):  # Ranks that exchange rows.
        assert ranks[first][0].events == ranks[second][0].events


# --- the next block's parameters ---


def log_of_gathers(prefetch: bool) -> list[str]:
    """All-gathers of parameters and the beginnings of blocks, in order."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group

    from titan_moe.distributed import fsdp

    if not prefetch:
        fsdp._prefetch = lambda units: None
    degrees = {"fsdp_reshard_after_forward": "always", "expert_parallel_degree": 2}
    sharded = build({"parallelism": degrees})
    (part,) = sharded.parts
    log, gather = Log(), group.foreach_all_gather
    names = {id(module): name for name, module in part.named_modules()}

    def gathered(params, *args, **kwargs):
        owner = params[0]._module_info.module
        log.mark_now(f"gather {names[id(owner)]}")
        return gather(params, *args, **kwargs)

    group.foreach_all_gather = gathered
    for number, block in part.layers.items():
        log.mark(block.attention_norm, f"compute {number}")
        log.mark(block.ffn_norm, f"compute {number}")
    train_once(sharded)
    return [f"{event.phase} {event.what}" for event in log.events]


def gathered_before(events: list[str], what: str, compute: str) -> bool:
    """Returns whether `what` was gathered before `compute` began."""
    first = next(n for n, event in enumerate(events) if event == compute)
    return any(f"gather {what}" in event for event in events[:first])


@pytest.mark.parametrize("prefetch", [True, False])
def test_the_next_blocks_parameters_are_gathered_before_a_block_computes(prefetch: bool):
    for events in run_on_ranks(log_of_gathers, 4, prefetch):
        turn = next(n for n, event in enumerate(events) if event.startswith("backward"))
        pairs = [("forward", 0, 1), ("forward", 1, 2)]
        # FSDP2 itself goes by the order of the forward where nothing is set.
        pairs += [("backward", 2, 1)] * prefetch
        ahead = [
            gathered_before(
                events[:turn] if phase == "forward" else events[turn:],
                f"layers.{next_}.{unit}",
                f"{phase} compute {now}",
            )
            for phase, now, next_ in pairs
            for unit in ("attention", "moe.experts")
        ]
        assert all(ahead) if prefetch else not any(ahead), events
