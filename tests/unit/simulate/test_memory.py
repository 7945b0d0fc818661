"""The memory estimate: against a count by hand, and against what the TOML files say."""

import os
import re
from pathlib import Path

import pytest

from tests.support.paths import REPO
from titan_moe.config.job_config import ActivationCheckpoint, Parallelism, Training
from titan_moe.models.config import GQAConfig, ModelConfig, RopeConfig
from titan_moe.simulate.memory import GIB, Memory, memory
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


def test_by_operation_results_are_kept():
    section = ActivationCheckpoint(mode="selective", selective_ac_option="op")
    training = Training(local_batch_size=3, seq_len=7)
    found = memory(_DENSE, training, Parallelism(), section, 4)
    # The input; queries, keys and values before and after rotation, attention's output and its
    # projection; gate, up and their projection.
    results = 10 + 2 * (2 + 2) * 5 + 2 * 5 + 10 + 2 * 30 + 10
    assert found.kept == 2 * 21 * results * 2
    assert found.layer == _estimate().layer


def test_the_option_of_another_mode_is_not_read():
    section = ActivationCheckpoint(mode="full", selective_ac_option="op")
    training = Training(local_batch_size=3, seq_len=7)
    assert memory(_DENSE, training, Parallelism(), section, 4) == _estimate("full")


def test_offload_moves_what_is_stored():
    on_gpu, offloaded = _estimate(), _estimate(enable_cpu_offload=True)
    assert (offloaded.stored, offloaded.host) == (0, on_gpu.stored)


def test_bfloat16_parameters_halve_what_is_stored():
    assert _estimate(dtype="bfloat16").stored == _estimate().stored / 2


def test_what_is_not_counted_is_refused():
    with pytest.raises(ValueError, match="pipeline"):
        memory(
            _DENSE, Training(), Parallelism(pipeline_parallel_degree=2), ActivationCheckpoint(), 4
        )


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
