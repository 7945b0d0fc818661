"""The estimate of a step's time: its FLOPs are the model's, its bytes those that are sent."""

from dataclasses import replace
from typing import Any

import pytest

from titan_moe.config.job_config import DEGREES, JobConfig
from titan_moe.models.hf import model_of_job
from titan_moe.models.registry import FAMILIES, flavors
from titan_moe.models.stats import layer_products, part_flops, part_sizes
from titan_moe.parallelize.policies import make_plan
from titan_moe.planner import step_time
from titan_moe.planner.load import BALANCED, Load
from titan_moe.planner.search import Question, fastest, frames
from titan_moe.planner.step_time import KINDS, REGIONS, Seconds, bound_by
from titan_moe.runtime.gpus import GPUS, Device
from titan_moe.runtime.process_pool import in_fresh_processes
from titan_moe.simulate.step import RankFacts, measure, rank_step

FAST = 1e30
COUNTS_FLOPS = Device(
    "one FLOP a second", 1.0, FAST, FAST, FAST, FAST,
    products=1.0, experts=1.0, attention=1.0, reach=1.0, dispatch=1 / FAST, latency=1 / FAST,
)  # fmt: skip
COUNTS_BYTES = replace(COUNTS_FLOPS, flops=FAST, link=1.0, network=1.0, node=10**6)


@pytest.fixture(autouse=True)
def kernels_without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_time, "_TILE", 1e-6)


def job(name: str = "deepseek_v3", flavor: str = "debugmodel", **tables: Any) -> JobConfig:
    training = {"seq_len": 64, "local_batch_size": 2, "global_batch_size": 16}
    return JobConfig.model_validate(
        {
            "model": {"name": name, "flavor": flavor},
            "training": training | tables.pop("training", {}),
            "activation_checkpoint": {"mode": "none"},
            **tables,
        }
    )


def seconds_of(job: JobConfig, ranks: int, device: Device, load: Load = BALANCED) -> Seconds:
    plan = make_plan(job, model_of_job(job.model), ranks, device_type="cuda", device_bytes=None)
    return step_time.step_time(plan, device, load)


@pytest.mark.parametrize(
    ("degrees", "ranks"),
    [
        ({}, 1),
        ({"tensor": 2, "expert": 4}, 8),
        ({"context": 2, "expert": 2, "expert_tensor": 2}, 4),
        ({"data_parallel_replicate_degree": 2, "expert": 4}, 8),
    ],
)
@pytest.mark.parametrize(
    "model",
    [
        ("deepseek_v3", "debugmodel"),
        ("qwen3_next", "debugmodel"),
        ("gpt_oss", "debugmodel"),
        ("nemotron_h", "debugmodel"),
        ("llama4", "debugmodel"),
    ],
)
def test_ranks_share_the_flops_of_the_model(
    model: tuple[str, str], degrees: dict[str, int], ranks: int
) -> None:
    keys = {n if "degree" in n else f"{n}_parallel_degree": x for n, x in degrees.items()}
    one = job(*model, parallelism=keys)
    found, config = seconds_of(one, ranks, COUNTS_FLOPS), model_of_job(one.model)
    tokens = 16 * 64 / ranks
    layers = range(config.num_layers + config.num_mtp_layers)
    mixing = sum(2 * layer_products(config, n, 64).mixing for n in layers)
    # Attention's backward computes scores again: 2.5 times its forward, and not 2.
    projections = 2 * 2 * config.dim**2 * config.num_mtp_layers
    wanted = 3 * (sum(part_flops(config, 64).values()) - projections) + 0.5 * mixing
    assert sum(found[region] for region in KINDS["arithmetic"]) == pytest.approx(tokens * wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_step(family: str) -> None:
    flavor = next(name for name in flavors(family) if name.startswith("debugmodel"))
    keys = {"expert_parallel_degree": 2, "pipeline_parallel_degree": 2}
    batch = {"local_batch_size": 8, "global_batch_size": 16}
    found = seconds_of(job(family, flavor, parallelism=keys, training=batch), 4, GPUS["H100"])
    assert 0 < sum(found.values()) < 1 and found["bubble"] > 0


def _traffic(facts: RankFacts, axis: str) -> float:
    """Bytes that left the rank over an axis alone, or joined with another of the same ranks."""
    rows = (ops for name, ops in facts.traffic.items() if axis in name.split("+"))
    return sum(sent for ops in rows for _, sent in ops.values())


LAYOUTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "rows to experts": ({"expert_parallel_degree": 8}, "exchange", "ep"),
    "gathers of tp": ({"tensor_parallel_degree": 4}, "tensor", "tp"),
    "parameters": ({}, "parameters", "fsdp"),
    "keys of cp": ({"context_parallel_degree": 4}, "context", "cp"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_are_those_that_a_rank_of_a_fake_world_sends(name: str) -> None:
    keys, region, axis = LAYOUTS[name]
    one = job("qwen3", "debugmodel_moe", parallelism={"fsdp_accumulation": "reduce_each", **keys})
    ((_, facts),) = in_fresh_processes(measure, [rank_step(one, 8)], num_workers=1)
    found = seconds_of(one, 8, COUNTS_BYTES)[region]
    assert found == pytest.approx(_traffic(facts, axis), rel=0.1)


def test_a_skewed_load_costs_experts_rows_and_exchanges_alone() -> None:
    one = job(parallelism={"expert_parallel_degree": 4})
    even = seconds_of(one, 4, GPUS["H100"])
    shares = tuple((5 / 16,) * 2 + (1 / 16,) * 6 for _ in range(3))
    skewed = seconds_of(one, 4, COUNTS_FLOPS, Load("hot", shares))
    plain = seconds_of(one, 4, COUNTS_FLOPS)
    assert skewed["experts"] == pytest.approx(2.5 * plain["experts"])
    assert skewed["products"] == plain["products"] and skewed["output"] == plain["output"]
    assert set(even) == set(REGIONS)


def test_ranks_that_lend_experts_are_even_and_send_weights_besides() -> None:
    shares = tuple((5 / 16,) * 2 + (1 / 16,) * 6 for _ in range(3))
    keys = {"expert_parallel_degree": 4, "expert_parallel_comm_backend": "standard"}
    lends = job(parallelism=keys | {"expert_parallel_comm_backend": "balanced"})
    moe, config = model_of_job(lends.model).moe, model_of_job(lends.model)
    assert moe is not None
    layers = config.num_layers + config.num_mtp_layers
    moe_layers = sum(config.is_moe_layer(layer) for layer in range(layers))
    # There, and their gradients back, in bfloat16; 3 of 4 parts leave a rank.
    of_rank = moe.num_experts / 4 * 3 * config.dim * moe.hidden_dim
    microbatches = 16 // 4 // 2
    weights = microbatches * moe_layers * 2 * 2 * of_rank * 3 / 4
    hot, standard = Load("hot", shares), job(parallelism=keys)
    for device, region, more in (
        (COUNTS_FLOPS, "experts", 0.0),
        (COUNTS_BYTES, "exchange", weights),
    ):
        even = seconds_of(standard, 4, device)[region]
        assert seconds_of(lends, 4, device)[region] == pytest.approx(even)
        assert seconds_of(lends, 4, device, hot)[region] == pytest.approx(even + more)
        assert seconds_of(standard, 4, device, hot)[region] == pytest.approx(2.5 * even)


@pytest.mark.parametrize(("word", "passes"), [("reduce_each", 4), ("keep_unsharded", 1)])
def test_experts_that_no_other_rank_shards_are_cast_in_each_pass_or_once(
    word: str, passes: int
) -> None:
    """Two microbatches have two passes each. A cast reads 4 bytes and writes 2, the copy after it
    moves 2 twice."""
    device = replace(COUNTS_FLOPS, flops=FAST, bandwidth=1.0)
    keys = {"expert_parallel_degree": 8, "fsdp_accumulation": word}
    one = job("qwen3", "debugmodel_moe", training={"local_batch_size": 1}, parallelism=keys)
    sizes = part_sizes(model_of_job(one.model))
    routed = sum(size.routed for name, size in sizes.items() if name.startswith("layers."))
    found = seconds_of(one, 8, device)["parameters"]
    assert found == pytest.approx(passes * 10 * routed / 8)
    assert seconds_of(one, 16, device)["parameters"] < 1e-9
    # One rank alone that computes in the type that it stores has no FSDP.
    alone = job("qwen3", "debugmodel_moe", training={"mixed_precision_param": "float32"})
    assert seconds_of(alone, 1, device)["parameters"] < 1e-9


def test_plan_keeps_experts_unsharded_where_no_other_rank_shards_them() -> None:
    one = job("qwen3", "30B-A3B", training={"seq_len": 4096})
    degrees = dict.fromkeys(DEGREES, 1) | {"dp_shard": 8, "ep": 8}
    question = Question(one, model_of_job(one.model), 8, GPUS["H200"], BALANCED)
    layout, _ = fastest(question, degrees)
    assert layout is not None and layout.plan.accumulation == "keep_unsharded"
    assert "keep_unsharded" not in str(list(frames(question, degrees | {"ep": 4})))


def test_kernels_compute_whole_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    one = job(parallelism={"expert_parallel_degree": 4})
    plain = seconds_of(one, 4, COUNTS_FLOPS)["experts"]
    moe = model_of_job(one.model).moe
    assert moe is not None
    # 4 ranks send their top_k rows of 128 tokens to 2 experts each.
    rows = 128 * moe.top_k * 4 // 8
    monkeypatch.setattr(step_time, "_TILE", 3 * rows)
    wide = 3 * rows * -(-moe.hidden_dim // (3 * rows))
    padded = seconds_of(one, 4, COUNTS_FLOPS)["experts"]
    assert padded == pytest.approx(plain * 3 * wide / moe.hidden_dim)


def test_a_pipeline_waits_for_its_bubble_and_recomputation_costs_a_forward() -> None:
    keys = {"pipeline_parallel_degree": 2}
    batch = {"local_batch_size": 8, "global_batch_size": 8}
    piped = job(parallelism=keys, training=batch)
    plain, full = (
        piped.with_values(activation_checkpoint={"mode": mode}) for mode in ("none", "full")
    )
    first, second = (seconds_of(each, 2, COUNTS_FLOPS) for each in (plain, full))
    busy = sum(first.values()) - first["bubble"]
    # 1F1B: a rank waits for one other, of 8 microbatches.
    assert first["bubble"] == pytest.approx(busy / 8)
    assert second["products"] == pytest.approx(first["products"] * 4 / 3)


def test_the_largest_kind_of_region_bounds_a_step() -> None:
    seconds = dict.fromkeys(REGIONS, 0.0) | {"products": 2.0, "exchange": 1.5, "tensor": 1.0}
    assert bound_by(seconds) == "links"
