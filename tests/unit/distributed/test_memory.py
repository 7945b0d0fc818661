"""The memory estimate: against a count by hand, and against what the TOML files say."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from scripts.bench.memory import most_allocated
from tests.support.paths import REPO
from tests.support.tiny import make_job, tiny, tiny_step
from titan_moe.config.job_config import ActivationCheckpoint, Optimizer, Parallelism, Training
from titan_moe.config.parse import resolve
from titan_moe.distributed.communicators import communicator_bytes
from titan_moe.distributed.memory import (
    GIB,
    MARGIN,
    Plan,
    choose_accumulation,
    communicators,
    memory,
)
from titan_moe.models.config import GQAConfig, ModelConfig, RopeConfig
from titan_moe.models.decoder import Decoder
from titan_moe.models.registry import model_config
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.layer import MoE
from titan_moe.runtime.process_pool import in_fresh_processes
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.simulate.fake_rank import balanced_choice
from titan_moe.simulate.step import measure
from titan_moe.train import prepare

_CONFIGS = REPO / "configs"
_SIZED = sorted(path for path in _CONFIGS.rglob("*.toml") if "# ranks: " in path.read_text())
_H100 = 79 * GIB

_DENSE = ModelConfig(
    vocab_size=100,
    dim=10,
    num_layers=2,
    hidden_dim=30,
    attention=GQAConfig(num_heads=2, num_kv_heads=1, head_dim=5),
    rope=RopeConfig(10_000.0),
    moe=None,
)
_TRAINING = Training(local_batch_size=3, seq_len=7)
_PLAN = Plan(_DENSE, _TRAINING, Parallelism(), ActivationCheckpoint(), Optimizer(), 4)
_LAYER = 2 * 10 + 2 * 10 * (10 + 5) + 3 * 10 * 30
_OUTPUT = 100 * 10


def _estimate(recompute="full", **training):
    section = _TRAINING.model_copy(update=training)
    return memory(_PLAN._replace(training=section, recompute=ActivationCheckpoint(mode=recompute)))  # type: ignore[arg-type]


def test_a_small_model_by_hand():
    found = _estimate()
    # Twice the embedding: the output layer is as large. Weights, gradients and moments in float32.
    assert found.stored == (2 * _LAYER + 2 * _OUTPUT + 10) * 16 / 4
    # In bfloat16 two layers' weights and one's gradients, which float32 reduces.
    assert found.gathered == _LAYER * (3 * 2 + 4) + _OUTPUT * (2 * 2 + 4)
    assert found.kept == 2 * 21 * 10 * 2
    values = 4 * 10 + (3 * 2 + 3 * 1) * 5 + 4 * 30
    assert found.layer == 2 * 21 * values * 2
    # Logits, then their gradients; the gradients of the layer's input and weight.
    assert found.logits == 21 * 100 * 2 + 21 * 10 * 2 + 100 * 10 * (4 + 2)
    chunked = _estimate(loss_chunk_size=5)
    assert found.logits - chunked.logits == (21 - 5) * 100 * 2
    assert _estimate(loss_chunk_size=0) == found
    # Float32 sums for 2 heads of 5, as wide as 32, and keys' and values' gradients of both, for 3
    # rows of 7 with room for 128 tokens after each.
    assert found.attention == (21 + 3 * 128) * (2 * 32 * 4 + 2 * 2 * 5 * 2)
    assert _estimate(mixed_precision_param="float32").attention == 0  # FlashAttention is narrow.
    assert found.total == sum(found.terms.values()) and found.copies == 0
    assert _estimate("none").kept == 2 * 21 * values * 2
    assert _estimate("selective").kept == 21 * values * 2 + 21 * 10 * 2


def test_weights_that_are_frozen_have_neither_gradients_nor_moments():
    config = model_config("deepseek_v32", "gate")
    training = _TRAINING.model_copy(update={"indexer_stage": "dense"})
    with torch.device("meta"):
        sizes = {name: p.numel() for name, p in Decoder(config).named_parameters()}
    trained = sum(size for name, size in sizes.items() if ".indexer." in name)
    found = memory(_PLAN._replace(config=config, training=training, world_size=1))
    assert found.stored == 4 * sum(sizes.values()) + 12 * trained


def test_two_reductions_under_way_where_experts_are_apart():
    found = memory(_PLAN._replace(parallelism=Parallelism(tensor_parallel_degree=2)))
    # Two dense layers in a row.
    assert found.gathered == (_LAYER * (3 * 2 + 2 * 4) + _OUTPUT * (2 * 2 + 4)) / 2
    sparse = replace(_DENSE, moe=MoEConfig(num_experts=64, top_k=2, hidden_dim=30))
    found = memory(_PLAN._replace(config=sparse, parallelism=Parallelism(expert_parallel_degree=4)))
    # One layer's experts, and its other parameters.
    layer = _LAYER - 3 * 10 * 30 + 10 * 64 + 64 / 4 * 3 * 10 * 30
    assert found.gathered == pytest.approx(layer * (3 * 2 + 4) + _OUTPUT * (2 * 2 + 4))


def test_by_operation_results_are_kept():
    section = ActivationCheckpoint(mode="selective", selective_ac_option="op")
    found = memory(_PLAN._replace(recompute=section))
    # The input; queries, keys and values before and after rotation, attention's output and its
    # projection; gate, up and their projection.
    results = 10 + 2 * (2 + 2) * 5 + 2 * 5 + 10 + 2 * 30 + 10
    assert found.kept == 2 * 21 * results * 2
    assert found.layer == _estimate().layer


@pytest.mark.parametrize(
    ("backend", "ep", "rows"),
    [("standard", 1, 0), ("standard", 4, 2), ("deduplicated", 4, 4 * (1 - (3 / 4) ** 2))],
)
def test_rows_that_were_exchanged_are_kept_beside_a_layers_input(backend, ep: int, rows: float):
    sparse = replace(_DENSE, moe=MoEConfig(num_experts=8, top_k=2, hidden_dim=6))
    parallelism = Parallelism(expert_parallel_degree=ep, expert_parallel_comm_backend=backend)
    plan = _PLAN._replace(config=sparse, parallelism=parallelism)
    full = ActivationCheckpoint(mode="full")
    keeping = full.model_copy(update={"keep_exchanged_rows": True})
    kept = [memory(plan._replace(recompute=section)).kept for section in (keeping, full)]
    assert kept[0] - kept[1] == pytest.approx(2 * 21 * rows * 10 * 2)


def test_attention_that_is_kept_takes_its_heads() -> None:
    full = ActivationCheckpoint(mode="full")
    keeping = full.model_copy(update={"keep_attention": True})
    kept = [memory(_PLAN._replace(recompute=section)).kept for section in (keeping, full)]
    heads = _DENSE.attention.num_heads * _DENSE.attention.qk_dim
    assert kept[0] - kept[1] == pytest.approx(2 * 21 * heads * 2)


@pytest.mark.parametrize(("schedule", "in_flight"), [("1F1B", 1), ("GPipe", 3)])
def test_the_heavier_rank_of_a_pipeline_by_hand(schedule, in_flight: int):
    parallelism = Parallelism(pipeline_parallel_degree=2, pipeline_parallel_schedule=schedule)
    recompute = ActivationCheckpoint(mode="full")
    found = memory(_PLAN._replace(parallelism=parallelism, recompute=recompute))
    # Its second rank: a layer, the norm and the output layer, over two ranks of four.
    parameters = _LAYER + 10 + _OUTPUT
    assert found.stored == parameters * 16 / 2
    # All weights stay gathered, and gradients are summed whole; half of them are counted already.
    assert found.accumulated == parameters * (4 + 2) - parameters * 4 / 2
    # Inputs of layers, outputs, and torch's buffers for each of three microbatches of one row.
    assert found.kept == (in_flight + in_flight + 2 * 3) * 7 * 10 * 2
    assert found.logits == 7 * 100 * 2 + in_flight * (7 * 10 * 2 + _OUTPUT * (4 + 2))


_FOUR_MICROBATCHES = {"global_batch_size": 4 * 4 * 3}
_WHOLE = 2 * _LAYER + 2 * _OUTPUT + 10
"""Parameters: all ranks have them all, gathered."""


def _shared(free: float, word: str = "auto", **training: object) -> str:
    """Returns the choice of four ranks whose GPUs have `free` bytes beside the model."""
    section = _TRAINING.model_copy(update={**_FOUR_MICROBATCHES, **training})
    plan = _PLAN._replace(training=section, parallelism=Parallelism(fsdp_accumulation=word))
    return choose_accumulation(plan, memory(plan).needed + free + MARGIN).word


def test_the_most_is_shared_that_fits():
    # Whole gradients where a quarter of them is counted already, and weights in bfloat16.
    sums, weights = _WHOLE * 4 - _WHOLE * 4 / 4, _WHOLE * 2
    assert _shared(sums + weights) == "keep_gathered"
    assert _shared(sums + weights - 1) == "reduce_each"
    assert _shared(sums + weights, global_batch_size=4 * 3) == "reduce_each"  # One microbatch.
    assert _shared(0, word="keep_gathered") == "keep_gathered"


def test_a_cpu_and_a_pipeline_share_nothing():
    plan = _PLAN._replace(training=_TRAINING.model_copy(update=_FOUR_MICROBATCHES))
    pipeline = Parallelism(pipeline_parallel_degree=2)
    on_cpu = choose_accumulation(plan, None)
    assert (on_cpu.word, on_cpu.microbatches) == ("reduce_each", 4)
    piped = choose_accumulation(plan._replace(parallelism=pipeline), 80 * GIB)
    assert (piped.word, piped.microbatches) == ("reduce_each", 1)


@pytest.mark.parametrize("path", _SIZED, ids=lambda path: str(path.relative_to(_CONFIGS)))
def test_a_config_states_its_memory_and_fits(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("titan_moe.train.count_gpus", lambda environment: 8)
    text = path.read_text()
    ranks = int(re.search(r"^# ranks: (\d+)$", text, re.MULTILINE)[1])  # type: ignore[index]
    job, config, _ = prepare(["--job.config_file", str(path)], ranks, os.environ)
    plan = _plan(job, config, ranks)
    found = memory(plan)
    comment = " ".join(line.removeprefix("# ") for line in text.splitlines())
    assert f"{found}; {found.needed / GIB:.1f} of 79.0 at most" in comment
    chosen = choose_accumulation(plan, _H100).estimate
    assert found.needed <= chosen.needed <= _H100 - MARGIN
    # A node of 8 has 2 TB.
    assert 8 * found.host < 1.9e12


def test_symmetric_memory_is_three_buffers():
    moe = MoEConfig(num_experts=8, top_k=2, hidden_dim=16)
    training = Training(local_batch_size=3, seq_len=8)
    plan = _PLAN._replace(config=replace(_DENSE, moe=moe), training=training)
    keys = {"expert_parallel_degree": 2, "data_parallel_shard_degree": 4}
    word = {"expert_parallel_comm_backend": "symmetric"}
    plain, symmetric, bounded = (
        memory(plan._replace(parallelism=Parallelism(**keys, **more)))
        for more in ({}, word, word | {"expert_parallel_capacity_factor": 1.5})
    )
    row = 10 * 2 + 64
    assert (plain.exchange, symmetric.exchange) == (0.0, 3 * 2 * 24 * 2 * row)
    assert bounded.exchange == 3 * 1.5 * 24 * 2 * row
    assert symmetric.total - plain.total == symmetric.exchange
    assert "symmetric memory" in str(symmetric) and "symmetric memory" not in str(plain)


def _plan(job, config: ModelConfig, world_size: int) -> Plan:
    sections = (job.training, job.parallelism, job.activation_checkpoint, job.optimizer)
    return Plan(config, *sections, world_size)


def test_communicators_and_states_are_those_of_a_step():
    degrees = {f"{axis}_parallel_degree": 2 for axis in ("pipeline", "context", "tensor", "expert")}
    nodes = {"expert_parallel_comm_backend": "deduplicated", "expert_parallel_ranks_per_node": 4}
    tables = {"training": {"local_batch_size": 2}, "optimizer": {"state_dtype": "bfloat16"}}
    layouts = (
        {"data_parallel_replicate_degree": 2, "expert_parallel_degree": 8, **nodes},
        {**degrees, "context_parallel_rotate_method": "ulysses"},
    )
    jobs = [make_job("qwen3", parallelism=layout, **tables) for layout in layouts]
    joined = {f"{axis}_parallel_degree": 2 for axis in ("tensor", "expert")}
    joined["data_parallel_replicate_degree"] = 2
    jobs.append(make_job("qwen3", parallelism=joined, optimizer={"name": "Muon"}))
    tasks = [(resolve(job, 16), replace(tiny(job), num_layers=2), 16, 0) for job in jobs]
    for task, facts in in_fresh_processes(measure, tasks, num_workers=1):
        plan = _plan(*tasks[task][:3])
        found = communicators(plan)
        send = [size > communicator_bytes(ranks, sends=False) for (ranks, _), size in found.items()]
        sent = [not {"all_to_all", "send"}.isdisjoint(ops) for ops in facts.traffic.values()]
        # And the world's. Under Muon too, all are made before the step.
        assert len(found) == facts.num_groups + 1
        # The estimate lets Muon exchange over fsdp and edp, whatever the cut.
        assert sum(send) == sum(sent) or (task == 2 and sum(send) > sum(sent))
        if task == 0:
            owned = 2 * facts.parameter_bytes + facts.optimizer_bytes
            assert memory(plan).stored == pytest.approx(owned, rel=0.01)


_TWO_RANKS = {"expert_parallel_degree": 2}
_SKEWED = make_job("qwen3", training={"seq_len": 256}, parallelism=_TWO_RANKS)


def _kept_beyond_an_even_share() -> int:
    """Returns the bytes that this rank keeps for the backward if the first rank gets all rows,
    beyond those with even shares."""
    (model,), kept = tiny_step(_SKEWED)[0].parts, []
    tokens_BS = torch.zeros(1, 256).long()
    for ranks in (2, 1):
        saved: list[torch.Tensor] = []
        for moe in model.moe_layers().values():
            moe.routing_fn = balanced_choice(moe.config.num_experts * ranks // 2, moe.config.top_k)
        with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):  # noqa: B023
            model(tokens_BS, tokens_BS.int(), torch.arange(256)[None])
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
        kept.append(sum(storages.values()))
    return kept[1] - kept[0]


def test_skewed_rows_are_those_of_a_forward():
    plan = _plan(_SKEWED, tiny(_SKEWED), 2)
    layers = plan.config.num_layers
    # The estimate has the values of one layer more, their gradients, and two copies of its rows.
    row = plan.config.dim + 2 * plan.config.moe.hidden_dim
    estimate = memory(plan).skew * layers * row / ((layers + 2) * row + 2 * plan.config.dim)
    assert estimate == pytest.approx(run_on_ranks(_kept_beyond_an_even_share, 2)[0], rel=0.05)


def test_live_rows_of_a_layer_are_within_the_estimate():
    """Few and small projections: rows of `dim` elements are most of what lives. On one rank, since
    gloo's threads hold an exchange's buffers for a while after it."""
    config = MoEConfig(num_experts=8, top_k=8, hidden_dim=32)
    layer, x_BSD = MoE(128, config, None), torch.randn(1, 2048, 128, requires_grad=True)
    for parameter in layer.parameters():
        parameter.grad = torch.nn.init.normal_(parameter.data).clone()
    layer(x_BSD).sum().backward()  # What is made once.
    peak = most_allocated(lambda: layer(x_BSD).sum().backward())

    def estimate(top_k: int) -> tuple[float, float]:
        model = replace(_DENSE, dim=128, moe=replace(config, top_k=top_k))
        training = Training(local_batch_size=1, seq_len=2048, mixed_precision_param="float32")
        found = memory(_PLAN._replace(config=model, training=training))
        return found.layer, found.copies

    (eight, copies), (four, _) = estimate(8), estimate(4)
    rows = 2 * (eight - four)
    assert rows < peak < rows + copies
