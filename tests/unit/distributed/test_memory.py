"""The memory estimate: against a count by hand, and against what the TOML files say."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.paths import REPO
from titan_moe.config.job_config import ActivationCheckpoint, Parallelism, Training
from titan_moe.distributed.memory import (
    GIB,
    RESERVED,
    Memory,
    choose_accumulation,
    memory,
)
from titan_moe.models.config import GQAConfig, ModelConfig, RopeConfig
from titan_moe.moe.config import MoEConfig
from titan_moe.train import prepare

_CONFIGS = REPO / "configs"
_SIZED = sorted(path for path in _CONFIGS.rglob("*.toml") if "# ranks: " in path.read_text())
# Of the 80 GB of an H100, 78 GiB are there; CUDA, NCCL and fragmentation take about 5.
_USABLE = 73 * GIB

_DENSE = ModelConfig(
    vocab_size=100,
    dim=10,
    num_layers=2,
    hidden_dim=30,
    attention=GQAConfig(num_heads=2, num_kv_heads=1, head_dim=5),
    rope=RopeConfig(10_000.0),
    moe=None,
)
_LAYER = 2 * 10 + 2 * 10 * (10 + 5) + 3 * 10 * 30
_OUTPUT = 100 * 10


def _estimate(recompute: str = "full", **training: object) -> Memory:
    section = Training(local_batch_size=3, seq_len=7, **training)  # type: ignore[arg-type]
    return memory(_DENSE, section, Parallelism(), ActivationCheckpoint(mode=recompute), 4)  # type: ignore[arg-type]


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
    assert found.total == sum((found.stored, found.gathered, found.kept, found.layer, found.logits))
    assert _estimate("none").kept == 2 * 21 * values * 2
    assert _estimate("selective").kept == 21 * values * 2 + 21 * 10 * 2


def test_two_reductions_under_way_where_experts_are_apart():
    training = Training(local_batch_size=3, seq_len=7)
    found = memory(
        _DENSE, training, Parallelism(tensor_parallel_degree=2), ActivationCheckpoint(), 4
    )
    # Of two dense layers in a row.
    assert found.gathered == (_LAYER * (3 * 2 + 2 * 4) + _OUTPUT * (2 * 2 + 4)) / 2
    sparse = replace(_DENSE, moe=MoEConfig(num_experts=64, top_k=2, hidden_dim=30))
    found = memory(
        sparse, training, Parallelism(expert_parallel_degree=4), ActivationCheckpoint(), 4
    )
    # Of one layer's experts, and of its other parameters.
    layer = _LAYER - 3 * 10 * 30 + 10 * 64 + 64 / 4 * 3 * 10 * 30
    assert found.gathered == pytest.approx(layer * (3 * 2 + 4) + _OUTPUT * (2 * 2 + 4))


def test_by_operation_results_are_kept():
    section = ActivationCheckpoint(mode="selective", selective_ac_option="op")
    training = Training(local_batch_size=3, seq_len=7)
    found = memory(_DENSE, training, Parallelism(), section, 4)
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
    training = Training(local_batch_size=3, seq_len=7)
    kept = [
        memory(sparse, training, parallelism, section, 4).kept
        for section in (
            ActivationCheckpoint(mode="full", keep_exchanged_rows=True),
            ActivationCheckpoint(mode="full"),
        )
    ]
    assert kept[0] - kept[1] == pytest.approx(2 * 21 * rows * 10 * 2)


@pytest.mark.parametrize(("schedule", "in_flight"), [("1F1B", 1), ("GPipe", 3)])
def test_the_heavier_rank_of_a_pipeline_by_hand(schedule, in_flight: int):
    training = Training(local_batch_size=3, seq_len=7)
    parallelism = Parallelism(pipeline_parallel_degree=2, pipeline_parallel_schedule=schedule)
    recompute = ActivationCheckpoint(mode="full")
    found = memory(_DENSE, training, parallelism, recompute, 4)
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
    """What four ranks choose whose GPUs have `free` bytes beside the model."""
    section = Training(local_batch_size=3, seq_len=7, **{**_FOUR_MICROBATCHES, **training})  # type: ignore[arg-type]
    parallelism = Parallelism(fsdp_accumulation=word)
    recompute = ActivationCheckpoint(mode="full")
    plain = memory(_DENSE, section, parallelism, recompute, 4).total
    size = plain + free + RESERVED
    return choose_accumulation(_DENSE, section, parallelism, recompute, 4, size).word


def test_the_most_is_shared_that_fits():
    # Whole gradients where a quarter of them is counted already, and weights in bfloat16.
    sums, weights = _WHOLE * 4 - _WHOLE * 4 / 4, _WHOLE * 2
    assert _shared(sums + weights) == "keep_gathered"
    assert _shared(sums + weights - 1) == "reduce_each"
    assert _shared(sums + weights, global_batch_size=4 * 3) == "reduce_each"  # One microbatch.
    assert _shared(0, word="keep_gathered") == "keep_gathered"


def test_a_cpu_and_a_pipeline_share_nothing():
    section = Training(local_batch_size=3, seq_len=7, **_FOUR_MICROBATCHES)  # type: ignore[arg-type]
    recompute, pipeline = ActivationCheckpoint(), Parallelism(pipeline_parallel_degree=2)
    on_cpu = choose_accumulation(_DENSE, section, Parallelism(), recompute, 4, None)
    assert (on_cpu.word, on_cpu.microbatches) == ("reduce_each", 4)
    piped = choose_accumulation(_DENSE, section, pipeline, recompute, 4, 80 * GIB)
    assert (piped.word, piped.microbatches) == ("reduce_each", 1)


@pytest.mark.parametrize("path", _SIZED, ids=lambda path: str(path.relative_to(_CONFIGS)))
def test_a_config_states_its_memory_and_fits(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("titan_moe.train.count_gpus", lambda environment: 8)
    text = path.read_text()
    ranks = int(re.search(r"^# ranks: (\d+)$", text, re.MULTILINE)[1])  # type: ignore[index]
    job, config = prepare(["--job.config_file", str(path)], ranks, os.environ)
    sections = (job.training, job.parallelism, job.activation_checkpoint)
    found = memory(config, *sections, world_size=ranks)
    comment = " ".join(line.removeprefix("# ") for line in text.splitlines())
    assert str(found) in comment
    assert found.total < _USABLE
    # A node of 8 has 2 TB.
    assert 8 * found.host < 1.9e12


def test_symmetric_memory_is_three_buffers():
    moe = MoEConfig(num_experts=8, top_k=2, hidden_dim=16)
    sparse, sections = replace(_DENSE, moe=moe), (Training(local_batch_size=3, seq_len=8),)
    keys = {"expert_parallel_degree": 2, "data_parallel_shard_degree": 4}
    plain, symmetric, bounded = (
        memory(sparse, *sections, Parallelism(**keys, **more), ActivationCheckpoint(), 4)
        for more in (
            {},
            {"expert_parallel_comm_backend": "symmetric"},
            {
                "expert_parallel_comm_backend": "symmetric",
                "expert_parallel_capacity_factor": 1.5,
            },
        )
    )
    row = 10 * 2 + 64
    assert (plain.exchange, symmetric.exchange) == (0.0, 3 * 2 * 24 * 2 * row)
    assert bounded.exchange == 3 * 1.5 * 24 * 2 * row
    assert symmetric.total - plain.total == symmetric.exchange
    assert "symmetric memory" in str(symmetric) and "symmetric memory" not in str(plain)
