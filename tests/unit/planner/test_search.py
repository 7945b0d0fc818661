"""The search for layouts: what it leaves out is nothing better."""

import random
from dataclasses import replace
from itertools import chain

import pytest

from tests.support.tiers import tiered
from titan_moe.cli.plan import survives
from titan_moe.config.job_config import DEGREES, JobConfig
from titan_moe.models.hf import model_of_job
from titan_moe.parallelize.memory import memory
from titan_moe.parallelize.policies import make_plan
from titan_moe.planner import search as module
from titan_moe.planner.load import read_load
from titan_moe.planner.search import Layout, Question, frames, legal_degrees, search, variants
from titan_moe.planner.step_time import bubble, step_time
from titan_moe.runtime.gpus import GIB, GPUS
from titan_moe.verify.layouts.layouts import legal_layouts


def question(
    ranks: int = 4,
    gib: float = 24.0,
    name: str = "deepseek_v3",
    flavor: str = "debugmodel",
    sequences: int = 8,
) -> Question:
    job = JobConfig.model_validate(
        {
            "model": {"name": name, "flavor": flavor},
            "training": {"seq_len": 512, "global_batch_size": sequences},
        }
    )
    model = model_of_job(job.model)
    assert model.moe is not None
    gpu = replace(GPUS["H100"], memory=gib * GIB, node=2)
    return Question(job, model, ranks, gpu, read_load("zipf:1", model.moe.num_experts))


def everything(asked: Question) -> dict[str, float]:
    """The fastest time that fits of each degrees, without any bound."""
    best: dict[str, float] = {}
    for degrees in legal_degrees(asked):
        name = " ".join(map(str, degrees.values()))
        of_frames = (variants(asked, degrees, frame) for frame in frames(asked, degrees))
        keys = chain.from_iterable(chain.from_iterable(of_frames))
        for plan in filter(None, map(asked.plan, keys)):
            if asked.needs(plan).needed <= asked.usable:
                seconds = sum(step_time(plan, asked.device, asked.load).values())
                best[name] = min(seconds, best.get(name, seconds))
    return best


def name_of(layout: Layout) -> str:
    return " ".join(str(getattr(layout.plan.dims, axis)) for axis in DEGREES)


@pytest.mark.parametrize(
    ("ranks", "gib", "cores"), tiered([(2, 8.6, 0), (2, 24.0, 1)], slow=[(4, 8.6, 0), (4, 24.0, 2)])
)
def test_pruned_search_finds_what_the_search_of_everything_finds(
    ranks: int, gib: float, cores: int
) -> None:
    asked = question(ranks, gib)
    asked = replace(asked, device=replace(asked.device, cores=cores))
    best, found = everything(asked), search(asked, keep=3)
    fastest = sorted(best.items(), key=lambda each: each[1])[:3]
    assert [layout.step_seconds for layout in found.layouts] == [time for _, time in fastest]
    assert fastest and not {name_of(layout) for layout in found.too_large} & best.keys()
    assert found.num_degrees > len(best) or gib > 10, "some degrees do not fit"


@pytest.mark.parametrize("ranks", [64, 1024])
def test_no_choice_needs_less_memory_or_time_than_the_bounds_say(ranks: int) -> None:
    asked = question(ranks, name="qwen3", flavor="235B-A22B", sequences=4096)
    chance = random.Random(0)
    checked = 0
    for degrees in chance.sample(list(legal_degrees(asked)), 40):
        of_degrees = list(frames(asked, degrees))
        whole = module._thriftiest(asked, degrees, of_degrees)
        if whole is None:
            continue
        bound = asked.least(degrees, whole.tables)
        frame = chance.choice(of_degrees)
        least = module._thriftiest(asked, degrees, [frame])
        for ways in variants(asked, degrees, frame):
            times = []
            for plan in filter(None, map(asked.plan, ways)):
                assert least is not None
                needed = asked.needs(plan).needed
                assert needed >= least.memory.needed and needed >= whole.memory.needed
                times.append(sum(step_time(plan, asked.device, asked.load).values()))
                assert times[-1] * (1 + 1e-9) >= max(times[0], bound / (1 - bubble(plan)))
                checked += 1
    assert checked > 500


@pytest.mark.parametrize(
    ("load", "lends"), [("zipf:1", True), ("uniform", False), ("balanced", False)]
)
def test_ranks_lend_experts_where_routers_are_known_to_be_uneven(load: str, lends: bool) -> None:
    asked = replace(question(), load=read_load(load, 8))
    for ep in (1, 4):
        degrees = dict.fromkeys(DEGREES, 1) | {"dp_shard": 4, "ep": ep}
        ways = next(iter(frames(asked, degrees)))
        tried = {
            keys["parallelism"]["expert_parallel_comm_backend"]
            for found in variants(asked, degrees, ways)
            for keys in found
        }
        assert ("balanced" in tried) == (lends and ep > 1)


def test_a_bound_that_is_too_high_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = question(gib=24.0)
    right = [layout.step_seconds for layout in search(asked, keep=3).layouts]
    bound = module.least_seconds
    # The order turns round: the fastest degrees come last.
    monkeypatch.setattr(module, "least_seconds", lambda *args: 1 / bound(*args))
    assert [layout.step_seconds for layout in search(asked, keep=3).layouts] != right


def test_degrees_are_those_of_all_legal_layouts() -> None:
    asked = question(ranks=8)
    ours = {tuple(degrees.values()) for degrees in legal_degrees(asked)}
    theirs = {(x.pp, x.dp_replicate, x.dp_shard, x.cp, x.tp, x.ep, x.etp) for x in legal_layouts(8)}
    heads = asked.model.attentions[0].num_kv_heads
    kept = {x for x in theirs if x[0] <= asked.model.num_layers and heads % x[4] == 0}
    assert ours == {x for x in kept if asked.model.moe and asked.model.moe.num_experts % x[5] == 0}


@pytest.mark.parametrize(
    ("factor", "says"),
    [(1.0, "survives even loads alone"), (1.5, "survives max/mean <= 1.5"), (4.0, "any load")],
)
def test_layout_says_up_to_which_load_it_fits(factor: float, says: str) -> None:
    asked = question()
    dispatched = {"expert_parallel_comm_backend": "standard", "expert_parallel_degree": 4}
    job = asked.job.with_values(parallelism=dispatched)
    plan = make_plan(job, asked.model, 4, device_type="cuda", ranks_per_node=2)
    fits = memory(plan, factor)
    layout = Layout(plan, {}, {}, fits, asked.device)
    assert says in survives(layout, fits.needed)
