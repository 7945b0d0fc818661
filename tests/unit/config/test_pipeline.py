"""Splits, rules and arithmetic of pipelines, compared with torch's own schedules."""

import random
from collections import Counter
from itertools import combinations, pairwise
from unittest.mock import patch

import pytest
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from titan_moe.config.job_config import Parallelism
from titan_moe.config.pipeline import (
    SCHEDULES,
    bubble_fraction,
    in_flight,
    model_parts,
    module_names,
    num_stages,
    problems,
    runs,
    stages_of_rank,
)

# Kind (F: forward; B: backward; I: of inputs; W: of weights), stage, microbatch.
Work = tuple[str, int, int]


class FakeStage:
    """Has what a schedule's constructor asks of a stage."""

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


def torch_order(name: str, rank: int, ranks: int, stages: int, microbatches: int) -> list[Work]:
    """Returns what a rank of torch's schedule does."""
    schedule = torch_schedule(name, ranks, stages, microbatches, rank)
    actions = [each for each in schedule.pipeline_order[rank] if each is not None]
    works = [work for each in actions for work in each.sub_actions or (each,)]
    return [(LETTERS[w.computation_type.name], w.stage_index, w.microbatch_index) for w in works]


def stage_counts(name: str, ranks: int) -> list[int]:
    per_rank = {"single": [1], "loop": [1, 2, 3], "v": [2]}[SCHEDULES[name].placement]
    return [ranks * count for count in per_rank]


def cases(name: str) -> list[tuple[int, int, int]]:
    return [
        (ranks, stages, microbatches)
        for ranks in (2, 3, 4, 8)
        for stages in stage_counts(name, ranks)
        for microbatches in (*range(1, 14), 16, 24)
    ]


# torch's classes of one stage a rank have no order to read.
@pytest.mark.parametrize("name", [n for n, s in SCHEDULES.items() if s.placement != "single"])
def test_microbatches_in_flight_are_those_of_torchs_order(name: str):
    compared, schedule = 0, SCHEDULES[name]
    for ranks, stages, microbatches in cases(name):
        if not runs(schedule, microbatches, ranks=ranks, stages=stages):
            continue
        compared += 1
        for rank in range(ranks):
            live, most, last = Counter[int](), 0, 0
            order = torch_order(name, rank, ranks, stages, microbatches)
            for kind, stage, _ in order:
                live[stage] += {"F": 1, "I": 0, "B": -1, "W": -1}[kind]
                most, last = max(most, live.total()), max(last, live[stages - 1])
            found = in_flight(schedule, rank, ranks, stages, microbatches)
            assert found >= (most, last) and found[1] == last, (ranks, stages, microbatches)
            exact = name != "ZBVZeroBubble" or microbatches >= 2 * ranks
            assert found[0] == most or not exact, (ranks, stages, microbatches)
            # Routing traces tell a stage's microbatches apart by their order.
            for stage in live:
                numbers = [mb for kind, at, mb in order if (kind, at) == ("F", stage)]
                assert numbers == list(range(microbatches))
    assert compared > 20


@pytest.mark.parametrize("name", SCHEDULES)
def test_rule_of_microbatches_is_torchs(name: str):
    refused = 0
    for ranks, stages, microbatches in cases(name):
        legal = runs(SCHEDULES[name], microbatches, ranks=ranks, stages=stages)
        try:
            torch_schedule(name, ranks, stages, microbatches)
        except ValueError:
            assert not legal, (ranks, stages, microbatches)
            refused += 1
        else:
            assert legal, (ranks, stages, microbatches)
    assert (refused > 0) == (SCHEDULES[name].microbatches != "any")


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("microbatches", [8, 16])
def test_bubbles_are_those_of_the_papers(ranks: int, microbatches: int):
    def bubble(name: str, stages: int) -> float:
        return bubble_fraction(SCHEDULES[name], ranks, stages, microbatches)

    plain = (ranks - 1) / (microbatches + ranks - 1)
    assert bubble("1F1B", ranks) == bubble("GPipe", ranks) == pytest.approx(plain)
    looped = (ranks - 1) / (2 * microbatches + ranks - 1)
    for name in ("LoopedBFS", "Interleaved1F1B"):
        assert bubble(name, 2 * ranks) == pytest.approx(looped)
    zero = (ranks - 1) / (6 * microbatches + ranks - 1)
    assert bubble("ZBVZeroBubble", 2 * ranks) == pytest.approx(zero)
    assert zero < bubble("DualPipeV", 2 * ranks) < looped


# --- splitting ------------------------------------------------------------------------------------


def parallelism(degree: int, schedule: str = "1F1B", **values: object) -> Parallelism:
    long = {
        key if key.startswith("module") else f"pipeline_parallel_{key}": value
        for key, value in values.items()
    }
    return Parallelism.model_validate(
        {"pipeline_parallel_degree": degree, "pipeline_parallel_schedule": schedule, **long}
    )


def weighed(layers: list[float], first: float = 0.0, last: float = 0.0) -> dict[str, float]:
    return dict(zip(module_names(len(layers)), [first, *layers, 0.0, last], strict=True))


def test_the_heaviest_stage_is_as_light_as_can_be():
    generator = random.Random(1)
    for _ in range(60):
        count = generator.randint(2, 9)
        stages = generator.randint(1, count)
        layers = [generator.choice([1.0, 2.0, 5.0]) for _ in range(count)]
        weights = weighed(layers, generator.choice([0, 3.0]), generator.choice([0, 7.0]))
        parts = model_parts(parallelism(stages), weights, count)
        assert [name for part in parts for name in part] == list(weights)
        assert len(parts) == stages
        assert all(any(name.startswith("layers.") for name in part) for part in parts)
        loads = []
        for inner in combinations(range(1, count), stages - 1):
            cut = [sum(layers[a:b]) for a, b in pairwise([0, *inner, count])]
            cut[0] += weights["tok_embeddings"]
            cut[-1] += weights["output"]
            loads.append(cut)
        ours = [sum(weights[name] for name in part) for part in parts]
        evenest = min((max(cut), sum(x * x for x in cut)) for cut in loads)
        assert (max(ours), sum(x * x for x in ours)) == evenest


def test_the_first_and_last_stage_may_be_lighter():
    weights = weighed([1.0] * 8, first=0.1, last=0.1)

    def layers_per_stage(**less: int) -> list[int]:
        parts = model_parts(parallelism(4, **less), weights, 8)
        return [sum(name.startswith("layers.") for name in part) for part in parts]

    assert layers_per_stage() == [2, 2, 2, 2]
    less = {"first_stage_less_layers": 2, "last_stage_less_layers": 2}
    assert layers_per_stage(**less) == [1, 3, 3, 1]
    assert layers_per_stage(last_stage_less_layers=4)[-1] == 1
    heavy_output = weighed([1.0] * 8, last=3.0)
    heavy, light = (
        model_parts(parallelism(2, last_stage_less_layers=less), heavy_output, 8)[0]
        for less in (None, 0)
    )
    assert heavy == ["tok_embeddings", *[f"layers.{i}" for i in range(5)]]
    assert light == module_names(8)[:5]


def test_every_stage_belongs_to_one_rank():
    assert num_stages(parallelism(4), 8) == 4
    assert num_stages(parallelism(4, "LoopedBFS"), 8) == 8
    assert num_stages(parallelism(2, "LoopedBFS", layers_per_stage=2), 12) == 6
    lighter = parallelism(2, "LoopedBFS", layers_per_stage=2, last_stage_less_layers=4)
    assert num_stages(lighter, 8) == 6
    for name, schedule in SCHEDULES.items():
        stages = stage_counts(name, 4)[-1]
        held = [stages_of_rank(schedule, rank, 4, stages) for rank in range(4)]
        assert sorted(stage for own in held for stage in own) == list(range(stages))
    folded = [stages_of_rank(SCHEDULES["DualPipeV"], rank, 2, 4) for rank in range(2)]
    assert folded == [[0, 3], [1, 2]]


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
START, END = HALVES


def parts(*stages: list[str]) -> Parallelism:
    return parallelism(2, module_fqns_per_model_part=list(stages))


# Configuration, layers, rows, and words of the one line.
BAD = [
    (parallelism(4, "LoopedBFS"), 4, 8, "choose a degree of at most 2"),
    (parallelism(2, "DualPipeV", layers_per_stage=2), 4, 8, "2 ranks want 4, each of at least one"),
    (parallelism(2, "Interleaved1F1B", layers_per_stage=3), 8, 8, "ranks want a multiple of 2"),
    (parallelism(4), 4, 3, "makes 3 microbatches of pipeline_parallel_microbatch_size=1: 1F1B wan"),
    (parallelism(2, "DualPipeV"), 4, 3, "as its 4 stages: choose local_batch_size 4"),
    (parallelism(2, microbatch_size=4), 4, 6, "must be a multiple of parallelism.pipeline_paralle"),
    (parallelism(2, "Interleaved1F1B"), 4, 7, "wants a multiple of 3 microbatches, its rounds ove"),
    (parallelism(4, module_fqns_per_model_part=HALVES), 4, 8, "makes 2 stages of 4 layers, and 4"),
    (parts(), 4, 8, "makes 0 stages of 4 layers, and 2 ranks want 2"),
    (parts(START, END[1:]), 4, 8, "once each, in this order: mend layers.2"),
    (parts([*START, "layers.2"], END), 4, 8, "once each, in this order: mend layers.2"),
    (parts(["rope", *START], END), 4, 8, "once each, in this order: mend rope"),
    (parts([START[0], START[2], START[1]], END), 4, 8, "once each, in this order: mend the order"),
    (parts(START[:1], [*START[1:], *END]), 4, 8, "has a stage without a layer: give it one"),
]


@pytest.mark.parametrize(("section", "num_layers", "rows", "words"), BAD)
def test_illegal_pipeline_is_one_line(section: Parallelism, num_layers: int, rows: int, words: str):
    (line,) = map(str, problems(section, num_layers=num_layers, local_batch_size=rows))
    assert line.startswith(("parallelism.", "training.")) and words in line


@pytest.mark.parametrize("name", SCHEDULES)
def test_offered_number_of_rows_is_legal(name: str):
    for ranks in (2, 4):
        section = parallelism(ranks, name)
        for rows in range(1, 20):
            for line in problems(section, num_layers=24, local_batch_size=rows):
                choice = int(str(line).split("choose local_batch_size ")[1])
                assert problems(section, num_layers=24, local_batch_size=choice) == []
