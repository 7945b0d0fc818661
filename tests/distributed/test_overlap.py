"""Overlaps, by the order of issue: shared experts beside rows, a unit beside the gathering of the
next one's parameters.

Logs of the order in which a process issues its work; how long it takes is no test's matter.
"""

import pytest
import torch

from tests.support.events import Log
from tests.support.tiers import tiered
from tests.support.tiny import SEQ_LEN, global_batch, make_job, tiny
from titan_moe.runtime.ranks import run_on_ranks

CPU = torch.device("cpu")

# --- shared experts beside rows ---


def build(tables: dict):
    import torch.distributed as dist

    from titan_moe.distributed.parallelize import build_sharded_model

    job = make_job("deepseek_v3", **tables)
    return build_sharded_model(job, tiny(job), device=CPU, world_size=dist.get_world_size())


def train_once(sharded) -> None:
    import torch.distributed as dist

    from titan_moe.distributed.execution import Microbatch

    rank = dist.get_rank()
    tokens, labels, documents = (x[rank : rank + 1] for x in global_batch(0, 96))
    positions = torch.arange(SEQ_LEN).expand(1, -1)
    sharded.execution.train(Microbatch(tokens, labels, documents, positions))


def log_of_a_step(recompute: str, planted: str) -> list[tuple[str, list[str]]]:
    """Each exchange of rows (not of weights) by its phase, and what was issued meanwhile."""
    sharded = build(
        {
            "parallelism": {"expert_parallel_degree": 2},
            "activation_checkpoint": {"mode": recompute},
        }
    )
    log = Log()
    log.watch_exchanges()
    for moe in sharded.moe_layers().values():
        log.mark(moe.shared_experts, "shared experts")
        if planted:
            _wait_at_once(moe.dispatcher)
    train_once(sharded)
    return [(start.phase, [e.what for e in inside]) for start, inside in log.inside()]


def _wait_at_once(dispatcher) -> None:
    """The serial order: rows have arrived before anything else is begun."""
    send, receive = dispatcher.send, dispatcher.receive
    dispatcher.send = lambda x_TD, weights_TK, plan: receive(send(x_TD, weights_TK, plan), plan)
    dispatcher.receive = lambda sent, plan: sent


@pytest.mark.parametrize("recompute", tiered(["none"], slow=["full"]))
def test_shared_experts_are_computed_while_rows_travel(recompute: str):
    for flights in run_on_ranks(log_of_a_step, 2, recompute, ""):
        beside = [phase for phase, inside in flights if "shared experts" in inside]
        # Tokens and their weights, in each of two layers; recomputation counts as the backward.
        assert beside.count("forward") == 2 * 2
        assert beside.count("backward") == 2 * 2 * (2 if recompute == "full" else 1)


def test_the_log_shows_the_serial_order():
    for flights in run_on_ranks(log_of_a_step, 2, "none", "serial"):
        assert not any("shared experts" in inside for _, inside in flights)


# --- one half of a microbatch beside the other's experts ---


def log_of_halves(overlap: bool) -> list[tuple[str, list[str]]]:
    sharded = build(
        {"parallelism": {"expert_parallel_degree": 2, "expert_parallel_overlap": overlap}}
    )
    log = Log()
    log.watch_exchanges()
    for moe in sharded.moe_layers().values():
        moe.experts.compute = _marked(moe.experts.compute, log)
    train_once(sharded)
    return [(start.phase, [e.what for e in inside]) for start, inside in log.inside()]


def _marked(compute, log: Log):
    def marked(*args):
        log.mark_now("experts")
        return log.seen(compute(*args), "experts")

    return marked


@pytest.mark.parametrize("overlap", [True, False])
def test_one_half_travels_while_the_experts_compute_the_other(overlap: bool):
    for flights in run_on_ranks(log_of_halves, 2, overlap):
        beside = [phase for phase, inside in flights if "experts" in inside]
        # In each of two layers the second half's rows and their weights on the way to the experts,
        # and the first half's outputs on the way back; in the backward gradients, of which one is
        # that of the second half's rows, its weights' included, and one of the first's outputs.
        assert beside.count("forward") == beside.count("backward") == (2 * 3 if overlap else 0)


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
    """Whether `what` was gathered before `compute` began."""
    first = next(n for n, event in enumerate(events) if event == compute)
    return any(f"gather {what}" in event for event in events[:first])


@pytest.mark.parametrize("prefetch", [True, False])
def test_the_next_blocks_parameters_are_gathered_before_a_block_computes(prefetch: bool):
    for events in run_on_ranks(log_of_gathers, 4, prefetch):
        turn = next(n for n, event in enumerate(events) if event.startswith("backward"))
        forward, backward = events[:turn], events[turn:]
        ahead = [
            gathered_before(forward, f"layers.{next_}.{unit}", f"forward compute {now}")
            for now, next_ in ((0, 1), (1, 2))
            for unit in ("attention", "moe.experts")
        ]
        # FSDP2 itself goes by the order of the forward where nothing is set.
        ahead += [
            gathered_before(backward, f"layers.{next_}.{unit}", f"backward compute {now}")
            for now, next_ in ((2, 1),)
            for unit in ("attention", "moe.experts")
            if prefetch
        ]
        assert all(ahead) if prefetch else not any(ahead), events
