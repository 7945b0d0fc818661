"""Splits, rules and orders of pipelines, compared with torch's own schedules."""

import random
from itertools import combinations, pairwise
from unittest.mock import patch

import pytest
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from titan_moe.config.job_config import Parallelism
from titan_moe.config.pipeline import (
    SCHEDULES,
    model_parts,
    module_names,
    num_stages,
    problems,
    runs,
    split_parts,
    stages_of_rank,
)
from titan_moe.config.pipeline_order import Work, bubble_fraction, pipeline_order


class FakeStage:
    """What a schedule's constructor asks of a stage."""

    def __init__(self, index: int, rank: int, ranks: int, stages: int) -> None:
        self.stage_index, self.group_rank = index, rank
        self.group_size, self.num_stages = ranks, stages
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.submod = None


def torch_schedule(name: str, ranks: int, stages: int, microbatches: int, rank: int = 0):
    held = stages_of_rank(SCHEDULES[name], rank, ranks, stages)
    fakes = [FakeStage(index, rank, ranks, stages) for index in held]
    kind = get_schedule_class(name)
    with patch.object(torch_schedules, "_check_torch_compile_compatibility", lambda *_: None):
        if issubclass(kind, PipelineScheduleMulti):
            return kind(fakes, microbatches)
        return kind(fakes[0], microbatches)


LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def torch_order(name: str, ranks: int, stages: int, microbatches: int) -> list[list[tuple]]:
    if SCHEDULES[name].placement == "single":
        return [performed(name, rank, ranks, microbatches) for rank in range(ranks)]
    order = torch_schedule(name, ranks, stages, microbatches).pipeline_order

    def slots(action):
        if action is None:
            return []
        works = action.sub_actions or (action,)
        return [
            tuple(
                Work(LETTERS[w.computation_type.name], w.stage_index, w.microbatch_index)
                for w in works
            )
        ]

    return [[slot for action in order[rank] for slot in slots(action)] for rank in range(ranks)]


def performed(name: str, rank: int, ranks: int, microbatches: int) -> list[tuple]:
    """What a single-stage schedule really does; its pipeline_order is for show, and 1F1B's wrong:
    in torch 2.13 the last rank's forwards are counted from 1."""
    schedule = torch_schedule(name, ranks, ranks, microbatches, rank)
    done: list[tuple] = []

    def forward(mb: int, *args: object, **kwargs: object) -> None:
        done.append((Work("F", rank, mb),))

    def backward(mb: int, **kwargs: object) -> None:
        done.append((Work("B", rank, mb),))

    stage = schedule._stage
    stage.forward_one_chunk, stage.backward_one_chunk = forward, backward
    for ops in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        setattr(stage, ops, lambda mb: [])
    stage.perform_reduce_grad = lambda factor: None
    schedule._initialize_stage = lambda *args: None
    schedule._step_microbatches()
    return done


def stage_counts(name: str, ranks: int) -> list[int]:
    per_rank = {"single": [1], "loop": [1, 2, 3], "v": [2]}[SCHEDULES[name].placement]
    return [ranks * count for count in per_rank]


CASES = [
    (name, ranks, stages, microbatches)
    for name in SCHEDULES
    for ranks in (2, 3, 4, 8)
    for stages in stage_counts(name, ranks)
    for microbatches in (*range(1, 14), 16, 24)
]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_order_is_torchs(name: str):
    compared = 0
    for _, ranks, stages, microbatches in (case for case in CASES if case[0] == name):
        if runs(SCHEDULES[name], microbatches, ranks=ranks, stages=stages):
            ours = pipeline_order(name, ranks, stages, microbatches)
            theirs = torch_order(name, ranks, stages, microbatches)
            assert ours == theirs, (ranks, stages, microbatches)
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rule_of_microbatches_is_torchs(name: str):
    refused = 0
    for _, ranks, stages, microbatches in (case for case in CASES if case[0] == name):
        legal = runs(SCHEDULES[name], microbatches, ranks=ranks, stages=stages)
        try:
            torch_schedule(name, ranks, stages, microbatches)
        except ValueError:
            assert not legal, (ranks, stages, microbatches)
            refused += 1
        else:
            assert legal, (ranks, stages, microbatches)
    assert (refused > 0) == (SCHEDULES[name].microbatches != "any")


def slow_bubble(orders: list[list[tuple]], stages: int, weights: list[float]) -> float:
    """By relaxation: start times grow until no dependency is broken. Shares nothing with ours."""
    cost = {"F": 1, "I": 1, "W": 1, "B": 2}
    steps = [(rank, slot) for rank, order in enumerate(orders) for slot in order]
    end: dict[tuple, float] = {}
    for _ in range(len(steps) + 1):
        before = dict(end)
        for rank, order in enumerate(orders):
            clock = 0.0
            for slot in order:
                inner = []
                for kind, stage, mb in slot:
                    waits = 0.0
                    if kind == "F" and stage > 0:
                        waits = end.get(("F", stage - 1, mb), 0.0)
                    elif kind in "IB" and stage + 1 < stages:
                        waits = max(end.get((k, stage + 1, mb), 0.0) for k in "IB")
                    elif kind in "IB":
                        waits = end.get(("F", stage, mb), 0.0)
                    clock = max(clock, waits) + cost[kind] * weights[stage]
                    inner.append((kind, stage, mb))
                end.update(dict.fromkeys(inner, clock))
            end["rank", rank] = clock
        if end == before:
            break
    else:
        raise AssertionError("a cycle")
    work = sum(cost[w.kind] * weights[w.stage] for _, slot in steps for w in slot)
    return 1 - work / (len(orders) * max(end["rank", rank] for rank in range(len(orders))))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_bubble_is_that_of_torchs_order(name: str):
    generator = random.Random(0)
    for _, ranks, stages, microbatches in (case for case in CASES if case[0] == name):
        legal = runs(SCHEDULES[name], microbatches, ranks=ranks, stages=stages)
        if not legal or ranks == 8 or microbatches > 9:
            continue
        for weights in ([1.0] * stages, [generator.choice([1.0, 2.0, 3.5]) for _ in range(stages)]):
            ours = bubble_fraction(name, ranks, stages, microbatches, weights)
            theirs = slow_bubble(torch_order(name, ranks, stages, microbatches), stages, weights)
            assert ours == pytest.approx(theirs, abs=1e-12), (ranks, stages, microbatches, weights)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_known_bubbles(ranks: int):
    for microbatches in (ranks, 2 * ranks, 4 * ranks):
        plain = (ranks - 1) / (microbatches + ranks - 1)
        for name in ("1F1B", "GPipe"):
            assert bubble_fraction(name, ranks, ranks, microbatches) == pytest.approx(plain)
        for per_rank in (2, 3):
            looped = (ranks - 1) / (per_rank * microbatches + ranks - 1)
            for name in ("LoopedBFS", "Interleaved1F1B"):
                fraction = bubble_fraction(name, ranks, per_rank * ranks, microbatches)
                assert fraction == pytest.approx(looped), name
        # arXiv 2401.10241, section 6: none once the pipeline is full, in that ratio of costs.
        zero = bubble_fraction("ZBVZeroBubble", ranks, 2 * ranks, 4 * ranks)
        assert zero == pytest.approx((ranks - 1) / (24 * ranks + ranks - 1))


@pytest.mark.parametrize("name", SCHEDULES)
def test_more_microbatches_wait_less(name: str):
    stages = stage_counts(name, 4)[-1]
    fractions = [bubble_fraction(name, 4, stages, count) for count in (12, 24, 48, 96)]
    assert all(more < fewer for fewer, more in pairwise(fractions))
    assert 0 <= fractions[-1] < 0.05


# --- splitting ------------------------------------------------------------------------------------


def weighed(layers: list[float], first: float = 0.0, last: float = 0.0) -> dict[str, float]:
    return dict(zip(module_names(len(layers)), [first, *layers, 0.0, last], strict=True))


def heaviest(parts: list[list[str]], weights: dict[str, float]) -> float:
    return max(sum(weights[name] for name in part) for part in parts)


def test_the_heaviest_stage_is_as_light_as_can_be():
    generator = random.Random(1)
    for _ in range(60):
        count = generator.randint(2, 9)
        stages = generator.randint(1, count)
        layers = [generator.choice([1.0, 2.0, 5.0]) for _ in range(count)]
        weights = weighed(layers, generator.choice([0, 3.0]), generator.choice([0, 7.0]))
        parts = split_parts(weights, stages)
        assert [name for part in parts for name in part] == list(weights)
        assert len(parts) == stages
        assert all(any(name.startswith("layers.") for name in part) for part in parts)
        loads = []
        for inner in combinations(range(1, count), stages - 1):
            borders = [0, *inner, count]
            cut = [sum(layers[a:b]) for a, b in pairwise(borders)]
            cut[0] += weights["tok_embeddings"]
            cut[-1] += weights["output"]
            loads.append(cut)
        lightest = min(max(cut) for cut in loads)
        assert heaviest(parts, weights) == pytest.approx(lightest)
        evenest = min(sum(x * x for x in cut) for cut in loads if max(cut) <= lightest + 1e-9)
        ours = sum(sum(weights[name] for name in part) ** 2 for part in parts)
        assert ours == pytest.approx(evenest)


def test_the_first_and_last_stage_may_be_lighter():
    weights = weighed([1.0] * 8, first=0.1, last=0.1)

    def layers_per_stage(**less: int) -> list[int]:
        parts = split_parts(weights, 4, **less)
        return [sum(name.startswith("layers.") for name in part) for part in parts]

    assert layers_per_stage() == [2, 2, 2, 2]
    assert layers_per_stage(first_less=2, last_less=2) == [1, 3, 3, 1]
    assert layers_per_stage(last_less=4)[-1] == 1
    heavy_output = weighed([1.0] * 8, last=3.0)
    parts = split_parts(heavy_output, 2)
    assert parts[0] == ["tok_embeddings", *[f"layers.{i}" for i in range(5)]]
    assert split_parts(heavy_output, 2, last_less=0)[0] == module_names(8)[:5]


def test_a_split_of_a_large_model_is_quick():
    parts = split_parts(weighed([1.0] * 128, last=2.0), 64)
    assert len(parts) == 64


def parallelism(degree: int, schedule: str = "1F1B", **values: object) -> Parallelism:
    long = {
        key if key.startswith("module") else f"pipeline_parallel_{key}": value
        for key, value in values.items()
    }
    return Parallelism.model_validate(
        {"pipeline_parallel_degree": degree, "pipeline_parallel_schedule": schedule, **long}
    )


def test_stages_and_their_ranks():
    assert num_stages(parallelism(4), 8) == 4
    assert num_stages(parallelism(4, "LoopedBFS"), 8) == 8
    assert num_stages(parallelism(2, "LoopedBFS", layers_per_stage=2), 12) == 6
    assert (
        num_stages(parallelism(2, "LoopedBFS", layers_per_stage=2, last_stage_less_layers=4), 8)
        == 6
    )
    for name, schedule in SCHEDULES.items():
        stages = stage_counts(name, 4)[-1]
        held = [stages_of_rank(schedule, rank, 4, stages) for rank in range(4)]
        assert sorted(stage for own in held for stage in own) == list(range(stages))
    assert [stages_of_rank(SCHEDULES["DualPipeV"], rank, 2, 4) for rank in range(2)] == [
        [0, 3],
        [1, 2],
    ]


def test_named_modules_are_kept_as_they_are():
    named = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "norm", "output"]]
    section = parallelism(2, module_fqns_per_model_part=named)
    assert problems(section, num_layers=3, local_batch_size=2) == []
    assert model_parts(section, weighed([1.0] * 3), 3) == named
    assert model_parts(parallelism(3), weighed([1.0] * 3), 3) == [
        ["tok_embeddings", "layers.0"],
        ["layers.1"],
        ["layers.2", "norm", "output"],
    ]


# --- rules ----------------------------------------------------------------------------------------

HALVES = [["tok_embeddings", "layers.0", "layers.1"], ["layers.2", "layers.3", "norm", "output"]]
BAD = [
    (parallelism(8), 4, 8, ["degree=8", "8 stages of 4 layers", "at most 4"]),
    (parallelism(4, "ZBVZeroBubble"), 4, 8, ["8 stages of 4 layers", "at most 2", "1F1B"]),
    (parallelism(4, "LoopedBFS"), 4, 8, ["8 stages", "layers_per_stage=1"]),
    (
        parallelism(2, layers_per_stage=1),
        4,
        8,
        ["=1 makes 4 stages of 4", "wants 2", "choose 2 (2 s"],
    ),
    (parallelism(2, "DualPipeV", layers_per_stage=2), 4, 8, ["wants 4", "choose 1 (4 stages)"]),
    (
        parallelism(2, "Interleaved1F1B", layers_per_stage=3),
        8,
        8,
        ["3 stages", "multiple of 2", "4 (2 stages) or 2 (4 stages) or 1 (8 stages)"],
    ),
    (parallelism(4), 4, 3, ["local_batch_size=3", "3 microbatches", "4 stages", "batch_size 4"]),
    (parallelism(2, "DualPipeV"), 4, 3, ["at least", "4 stages", "choose local_batch_size 4"]),
    (parallelism(2, microbatch_size=4), 4, 6, ["multiple of", "=4", "choose 8"]),
    (parallelism(2, microbatch_size=4), 4, 4, ["1 microbatches", "choose local_batch_size 8"]),
    (
        parallelism(2, "Interleaved1F1B"),
        4,
        7,
        ["7 microbatches", "multiple of 3", "2 ranks", "choose local_batch_size 6 or 8"],
    ),
    (parallelism(4, module_fqns_per_model_part=HALVES), 4, 8, ["lists 2 stages", "wants 4"]),
    (parallelism(2, "GPipe", module_fqns_per_model_part=[]), 4, 8, ["lists 0 stages", "wants 2"]),
    (
        parallelism(2, module_fqns_per_model_part=[HALVES[0], ["layers.3", "norm", "output"]]),
        4,
        8,
        ["'layers.2' 0 times", "add it"],
    ),
    (
        parallelism(2, module_fqns_per_model_part=[[*HALVES[0], "layers.2"], HALVES[1]]),
        4,
        8,
        ["'layers.2' 2 times", "once"],
    ),
    (
        parallelism(2, module_fqns_per_model_part=[["rope", *HALVES[0]], HALVES[1]]),
        4,
        8,
        ["'rope'", "no part", "layers.3", "every stage has the rotations"],
    ),
    (
        parallelism(2, module_fqns_per_model_part=[[*HALVES[0], "layers.7"], HALVES[1]]),
        4,
        8,
        ["'layers.7'", "no part"],
    ),
    (
        parallelism(
            2,
            module_fqns_per_model_part=[["tok_embeddings", "layers.1", "layers.0"], HALVES[1]],
        ),
        4,
        8,
        ["'layers.1' out of the model's order"],
    ),
    (
        parallelism(
            2,
            module_fqns_per_model_part=[
                ["tok_embeddings"],
                ["layers.0", "layers.1", *HALVES[1]],
            ],
        ),
        4,
        8,
        ["stage 0 (tok_embeddings) has no layer"],
    ),
]


@pytest.mark.parametrize("section, num_layers, rows, words", BAD)
def test_a_mistake_gets_one_line(section, num_layers: int, rows: int, words: list[str]):
    (line,) = problems(section, num_layers=num_layers, local_batch_size=rows)
    assert "\n" not in line
    assert line.startswith(("parallelism.", "training."))
    for word in words:
        assert word in line


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_offered_is_legal(name: str):
    """Following a line's advice on the number of rows leads to a configuration that runs."""
    for ranks in (2, 4):
        section = parallelism(ranks, name)
        for rows in range(1, 20):
            for line in problems(section, num_layers=24, local_batch_size=rows):
                for choice in line.split("choose local_batch_size ")[1].split(" or "):
                    assert problems(section, num_layers=24, local_batch_size=int(choice)) == []


def test_without_a_pipeline_there_is_nothing_to_say():
    assert problems(parallelism(1, layers_per_stage=3), num_layers=1, local_batch_size=1) == []
