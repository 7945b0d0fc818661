"""Pipelines of every schedule give the gradients of one plain process, in float64.

Compared: every parameter's gradient as a sum over two schedule runs, auxiliary losses, tokens per
expert, the loss, and an evaluation of other shapes. The reference is a plain module and a loop.
"""

from itertools import product

import pytest

from tests.support.pipelines import (
    LAYERS,
    SEQ_LEN,
    check,
    model_dims,
    new_model,
    plain_training,
    run_pipeline,
    wrong,
)
from tests.support.tiers import split, tiered
from titan_moe.config.pipeline import SCHEDULES, module_names, split_parts
from titan_moe.runtime.ranks import RankError, run_on_ranks


@pytest.fixture(scope="module")
def references() -> dict[int, list[dict]]:
    return plain_training()


LAYOUTS = [
    {"degrees": {"pp": 2, "dp_shard": 1}, "rows": 16},
    {"degrees": {"pp": 4, "dp_shard": 1}, "rows": 16},
    {"degrees": {"pp": 2, "dp_shard": 2}, "rows": 32},
    {"degrees": {"pp": 2, "dp_shard": 2, "ep": 2}, "rows": 32},
]


@pytest.mark.parametrize(
    "layout, schedule",
    tiered(
        product(LAYOUTS[:1], SCHEDULES),
        slow=product(LAYOUTS[3:], SCHEDULES),
        full=product(LAYOUTS[1:3], SCHEDULES),
    ),
    ids=lambda value: value if isinstance(value, str) else str(value["degrees"]),
)
def test_a_pipeline_has_the_gradients_of_one_process(references, layout: dict, schedule: str):
    check(references, {**layout, "schedule": schedule})


OTHERS = [
    {"degrees": {"pp": 2, "dp_shard": 2, "dp_replicate": 2, "ep": 2}, "schedule": "1F1B"},
    {"degrees": {"pp": 2, "dp_replicate": 2, "dp_shard": 1}, "schedule": "ZBVZeroBubble"},
    {"degrees": {"pp": 2, "dp_shard": 2, "etp": 2}, "schedule": "DualPipeV"},
    {"degrees": {"pp": 4, "dp_shard": 2, "ep": 2}, "schedule": "Interleaved1F1B"},
    {"degrees": {"pp": 2, "dp_shard": 2}, "schedule": "1F1B", "microbatch_size": 2},
    {"degrees": {"pp": 2, "dp_shard": 2}, "schedule": "InterleavedZeroBubble", "per_rank": 4},
    {"degrees": {"pp": 8, "dp_shard": 1}, "schedule": "LoopedBFS", "per_rank": 1},
    {"degrees": {"pp": 8, "dp_shard": 1}, "schedule": "InterleavedZeroBubble", "per_rank": 1},
    {"degrees": {"pp": 3, "dp_shard": 1}, "schedule": "Interleaved1F1B", "runs": 4},
    {"degrees": {"pp": 2, "dp_shard": 1}, "schedule": "ZBVZeroBubble", "fsdp": False},
    # Gradients are kept and reduced in another type than they come in, by other lines of FSDP.
    *(
        {"degrees": {"pp": 2, "dp_shard": 2}, "schedule": name, "compute": "float32"}
        for name in ("1F1B", "ZBVZeroBubble", "DualPipeV")
    ),
    *(
        {"degrees": {"pp": 2, "dp_shard": 1, "tp": 2, "etp": 2}, "schedule": name}
        for name in ("1F1B", "LoopedBFS", "InterleavedZeroBubble", "DualPipeV")
    ),
    *(
        {"degrees": {"pp": 2, "dp_shard": 2, "ep": 2}, "schedule": name, "reshard": "always"}
        for name in SCHEDULES
    ),
]


@pytest.mark.parametrize("case", split(OTHERS, [], OTHERS[::5]), ids=str)
def test_other_layouts_too(references, case: dict):
    check(references, {"rows": 32 if case["degrees"].get("pp") != 3 else 8, **case})


NON_SPLIT = [name for name, schedule in SCHEDULES.items() if not schedule.splits_backward]


@pytest.mark.parametrize(
    "schedule, recompute, times",
    tiered(
        [("1F1B", True, 2)],
        slow=[("1F1B", False, 1), ("Interleaved1F1B", True, 2)],
        full=[
            (name, recompute, 1 + recompute)
            for name in NON_SPLIT
            for recompute in (False, True)
            if (name, recompute) not in [("1F1B", True), ("1F1B", False), ("Interleaved1F1B", True)]
        ],
    ),
)
def test_recompute_runs_each_block_twice(references, schedule: str, recompute: bool, times: int):
    case = {**LAYOUTS[0], "schedule": schedule, "recompute": recompute}
    results = check(references, case)
    for step in range(2):
        forwards: dict[str, int] = {}
        for result in results:
            forwards |= result[step]["forwards"]
        assert forwards == {str(layer): 16 * times for layer in range(LAYERS)}


def test_split_backward_with_recompute_fails():
    """Why the configuration refuses it: a block would be recomputed for every weight."""
    case = {**LAYOUTS[0], "schedule": "ZBVZeroBubble", "recompute": True}
    with pytest.raises(RankError, match="recompute_fn"):
        run_on_ranks(run_pipeline, 2, case)


PLANTED = [
    ("gradients scaled", "DualPipeV", "1 gradient output.weight", "0 loss"),
    (
        "parameters freed after the forward",
        "ZBVZeroBubble",
        "0 gradient layers.3.attention.wo.weight",
        "0 loss",
    ),
    (
        "auxiliary loss added in the forward",
        "InterleavedZeroBubble",
        "0 balance loss layers.2",
        "0 gradient norm.weight",
    ),
    ("documents of other rows", "GPipe", "0 loss", "0 counts layers.0"),
]


@pytest.mark.parametrize(
    "bug, schedule, shown_by, not_by",
    [
        ("gradients scaled", "1F1B", "0 gradient layers.2.moe.experts.w1", "0 loss"),
        *tiered([], slow=PLANTED),
    ],
)
def test_the_comparison_finds_planted_bugs(references, bug, schedule, shown_by, not_by):
    case = {**LAYOUTS[3], "schedule": schedule, "reshard": "always"}
    results = run_on_ranks(run_pipeline, 4, case, bug)
    found = wrong(results, references[case["rows"]])
    assert shown_by in found
    assert not_by not in found


def test_a_stage_keeps_names_and_drops_the_rest():
    from titan_moe.models.decoder import keep_only, stage_units
    from titan_moe.models.stats import part_weights

    names = [name for name, _ in new_model().named_parameters()]
    parts = split_parts(part_weights(model_dims(), SEQ_LEN), 4)
    assert [name for part in parts for name in part] == module_names(LAYERS)
    stages = [keep_only(new_model(), part) for part in parts]
    assert [name for stage in stages for name, _ in stage.named_parameters()] == names
    assert len(stage_units(stages[0])[0]) == len(stages[0].layers) + 1
    assert len(stage_units(stages[1])[0]) == len(stages[1].layers)
    with pytest.raises(AssertionError, match=r"layers\.9"):
        keep_only(new_model(), ["layers.9"])
