"""Decisions of a plan: by device, by layout, by what a job leaves open."""

from dataclasses import replace
from typing import Any, get_args

import pytest

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig, Parallelism
from titan_moe.distributed.expert_parallel import DISPATCHERS
from titan_moe.models.registry import model_config
from titan_moe.moe.config import MoEConfig
from titan_moe.parallelize.memory import MARGIN, memory
from titan_moe.parallelize.memory_table import tables
from titan_moe.parallelize.plan import Plan
from titan_moe.parallelize.policies import make_plan


def plan_of(ranks: int = 8, device: str = "cuda", **tables: Any) -> Plan:
    job = JobConfig.model_validate(tables)
    return make_plan(job, model_config("qwen3", "gate"), ranks, device_type=device)


@pytest.mark.parametrize(
    ("device", "compute", "key", "expected"),
    [
        ("cuda", "bfloat16", None, 8),
        ("cuda", "bfloat16", 1, 1),
        ("cuda", "float32", None, 1),
        ("cpu", "bfloat16", None, 128),
        ("cpu", "float32", None, 1),
    ],
)
def test_row_alignment_by_device_and_type(device, compute, key, expected):
    tables = {"training": {"mixed_precision_param": compute}, "moe": {"row_alignment": key}}
    config = plan_of(1, device, **tables).config
    assert config.moe is not None and config.moe.row_alignment == expected


@pytest.mark.parametrize(
    ("parallelism", "frees", "frees_last"),
    [
        ({}, True, False),
        ({"pipeline_parallel_degree": 2}, False, False),
        ({"pipeline_parallel_degree": 2, "fsdp_reshard_after_forward": "always"}, True, True),
        ({"fsdp_reshard_after_forward": "never"}, False, False),
        ({"fsdp_reshard_after_forward": "always"}, True, True),
        ({"fsdp_accumulation": "keep_gathered"}, False, False),
    ],
)
def test_units_are_freed_after_the_forward_as_the_key_and_the_layout_say(
    parallelism, frees, frees_last
):
    plan = plan_of(parallelism=parallelism, training={"local_batch_size": 4})
    assert (plan.reshard_after_forward, plan.reshard_last) == (frees, frees_last)


@pytest.mark.parametrize("ep", [8, 4])
def test_auto_keeps_as_much_gathered_as_fits(ep: int):
    """With ep 8 of 8 ranks no other rank has a part of a rank's experts, with ep 4 one has."""
    words = ["reduce_each", *["keep_unsharded"] * (ep == 8), "keep_gathered"]

    def plan(word: str, device_bytes: float | None = None) -> Plan:
        keys = {"expert_parallel_degree": ep, "fsdp_accumulation": word}
        training = {"local_batch_size": 1, "global_batch_size": 16}
        job = JobConfig.model_validate({"parallelism": keys, "training": training})
        config = model_config("qwen3", "gate")
        return make_plan(job, config, 8, device_type="cuda", device_bytes=device_bytes)

    needs = [memory(plan(word)).needed + MARGIN for word in words]
    assert needs == sorted(set(needs))
    assert [plan("auto", most).accumulation for most in needs] == words
    assert plan("auto", needs[-1] - 1).accumulation == words[-2]
    # What stays gathered is not gathered once more.
    gathered = [
        [sum(table["gathered"].values()) for _, _, table in tables(plan(word))]
        for word in words[:2]
    ]
    assert all(kept <= each for each, kept in zip(*gathered, strict=True))
    assert gathered[0] != gathered[1]


@pytest.mark.parametrize(
    ("ep", "keys", "name", "rows"),
    [
        (1, {}, "standard", 0),
        (2, {}, "standard", 0),
        (1, {"comm_backend": "symmetric"}, "standard", 0),
        (2, {"comm_backend": "symmetric"}, "symmetric", 1),  # All tokens of both ranks can come.
        (2, {"capacity_factor": 2.0}, "capacity", 0),
        (1, {"comm_backend": "deduplicated"}, "deduplicated", 0),
    ],
)
def test_dispatcher_and_its_buffers_by_keys(ep, keys, name, rows):
    degree = {"degree": ep}
    parallelism = {f"expert_parallel_{key}": value for key, value in (keys | degree).items()}
    plan = plan_of(parallelism=parallelism, training={"seq_len": 16, "local_batch_size": 1})
    assert plan.config.moe is not None and plan.dispatch.name == name
    assert plan.exchange_rows == rows * 2 * 16 * plan.config.moe.top_k
    assert bool(plan.dispatch_reason) == (ep > 1 and not keys)


@pytest.mark.parametrize(
    "ep, top_k, etp, on_node, name, reason",
    [
        (8, 8, 1, 8, "deduplicated", "5.25 of 8 ranks on average, 1.52 rows for one"),
        (16, 8, 1, 16, "deduplicated", "6.45 of 16 ranks on average, 1.24 rows for one"),
        (32, 8, 1, 32, "standard", "7.18 of 32 ranks on average, 1.11 rows for one"),
        (32, 8, 1, 8, "deduplicated", "3.60 of 4 nodes on average, 2.22 rows for one"),
        (16, 8, 2, 8, "deduplicated", "3.60 of 4 nodes on average, 2.22 rows for one"),
        (32, 1, 1, 8, "standard", "1.00 of 4 nodes on average, 1.00 rows for one"),
        (4, 8, 1, 4, "standard", "3.60 of 4 ranks on average, 2.22 rows for one"),
    ],
)
def test_rows_are_deduplicated_where_it_pays(ep, top_k, etp, on_node, name, reason):
    degrees = {"expert_parallel_degree": ep, "expert_tensor_parallel_degree": etp}
    config = replace(model_config("qwen3", "gate"), moe=MoEConfig(128, top_k, 8))
    job = JobConfig.model_validate({"parallelism": degrees})
    plan = make_plan(job, config, 64, ranks_per_node=on_node)
    assert plan.dispatch == (name, None, on_node, 1)
    assert plan.dispatch_reason == f"a token's {top_k} experts are on {reason}"


def test_every_word_of_the_configuration_has_a_dispatcher():
    words = get_args(Parallelism.model_fields["expert_parallel_comm_backend"].annotation)
    assert words and set(words) - {"auto"} <= set(DISPATCHERS)


def test_plan_of_a_pipeline_names_the_stages_of_each_rank():
    pipeline = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"}
    plan = plan_of(parallelism=pipeline, training={"local_batch_size": 4})
    assert plan.stages_of_ranks == [[0, 3], [1, 2]] and len(plan.stages) == 4
    with pytest.raises(ConfigError, match="pipeline_parallel_degree=8 with"):
        plan_of(parallelism=pipeline | {"pipeline_parallel_degree": 8})


def test_types_are_float64_everywhere_if_parameters_are():
    training = {"dtype": "float64", "mixed_precision_param": "bfloat16"}
    assert set(plan_of(training=training).types) == {"float64"}
    assert plan_of().types == ("float32", "bfloat16", "float32")


def test_only_a_change_of_the_layout_asks_for_another_model():
    longer, recomputed = {"seq_len": 4096}, {"mode": "full"}
    plan = plan_of()
    assert plan_of(training=longer).fits_model_of(plan)
    assert not plan_of(activation_checkpoint=recomputed).fits_model_of(plan)
    assert not plan_of(parallelism={"tensor_parallel_degree": 2}).fits_model_of(plan)
