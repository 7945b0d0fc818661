"""Keys without effect are notes, and a cluster's file starts on a laptop."""

import pytest

from tests.support.config_checks import DENSE, MODEL, job_of, noted
from titan_moe.config.checks.notes import fit_to_cpu
from titan_moe.config.job_config import JobConfig, Parallelism
from titan_moe.models.config import ModelConfig

_LATER = '[{"from_step":2,"parallelism":{"expert_parallel_degree":2}}]'
_EP, _P = "ep 2", "--p.expert_parallel"
_PARTS = (
    "--p.module_fqns_per_model_part="
    '[["tok_embeddings","layers.0","layers.1"],["layers.2","layers.3","norm","output"]]'
)


@pytest.mark.parametrize(
    ("arguments", "model", "line"),
    [
        ("--moe.row_alignment 16", DENSE, "moe.row_alignment=16 has no effect: deepseek_v3 debugm"),
        ("--debug.moe_force_load_balance", DENSE, "debug.moe_force_load_balance=true has no effec"),
        (_EP, DENSE, "parallelism.expert_parallel_degree=2 has no effect: deepseek_v3 debugmodel "),
        (f"{_P}_comm_backend symmetric", DENSE, "parallelism.expert_parallel_comm_backend=symmetr"),
        (f"{_P}_capacity_factor 1.5", MODEL, "parallelism.expert_parallel_capacity_factor=1.5 has"),
        (f"{_P}_overlap true", MODEL, "parallelism.expert_parallel_overlap=true has no effect: ex"),
        (f"{_EP} {_P}_overflow drop", MODEL, "parallelism.expert_parallel_overflow=drop has no ef"),
        (
            f"{_EP} {_P}_comm_backend standard {_P}_ranks_per_node 2",
            MODEL,
            "parallelism.expert_parallel_ranks_per_node=2 has no effect: expert_parallel_comm_back",
        ),
        ("--p.enable_async_tensor_parallel", MODEL, "parallelism.enable_async_tensor_parallel=tru"),
        ("pp 2 --p.fsdp_accumulation reduce_each", MODEL, "parallelism.fsdp_accumulation=reduce_"),
        (
            f"pp 2 {_PARTS} --p.pipeline_parallel_layers_per_stage 2",
            MODEL,
            "parallelism.pipeline_parallel_layers_per_stage=2 has no effect: module_fqns_per_model",
        ),
        ("--training.mtp_loss_weight 0.1", MODEL, "training.mtp_loss_weight=0.1 has no effect: de"),
        ("--training.on_spike skip", MODEL, "training.on_spike=skip has no effect: training.spike"),
        ("--training.text_column body", MODEL, "training.text_column=body has no effect: the data"),
        ("--validation.text_column a", MODEL, "validation.text_column=a has no effect: validation"),
        ("--checkpoint.load_only", MODEL, "checkpoint.load_only=true has no effect: checkpoint.en"),
        ("--debug.capture_step 9 --training.steps 8", MODEL, "debug.capture_step=9 has no effect:"),
        ("--optimizer.muon_steps 6", MODEL, "optimizer.muon_steps=6 has no effect: optimizer.name"),
    ],
)  # fmt: skip
def test_key_without_effect_is_a_note(arguments: str, model: ModelConfig, line: str) -> None:
    (note,) = noted(arguments, ranks=2, model=model)
    assert note.startswith(line)


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--moe.row_alignment 16",
        f"{_EP} {_P}_capacity_factor 1.5 {_P}_overflow drop",
        f"{_EP} {_P}_ranks_per_node 2",  # The automatic choice reads it.
        f"{_P}_comm_backend deduplicated",  # Where nothing travels all backends are alike.
        "--optimizer.muon_steps 6 --optimizer.name Muon",
        f"{_P}_overlap true --stages {_LATER}",
    ],
)
def test_key_with_effect_is_no_note(arguments: str) -> None:
    assert noted(arguments, ranks=2) == []


def test_gpu_only_keys_are_switched_off_on_a_cpu() -> None:
    keys = (
        "--training.enable_cpu_offload --profiling.enable_memory_snapshot "
        "--comm.init_communicators_eagerly "
        f"--p.enable_async_tensor_parallel {_P}_comm_backend symmetric "
        "--model.converters quantize.linear.float8"
    )
    job, lines = fit_to_cpu(job_of(keys), bfloat16_units=True)
    assert job == JobConfig()
    assert len(lines) == 6 and all(" has no effect on a CPU: " in line for line in lines)
    assert fit_to_cpu(job, bfloat16_units=True) == (job, [])


def test_stages_lose_gpu_only_keys_too() -> None:
    stages = '[{"from_step":2,"parallelism":{"expert_parallel_comm_backend":"symmetric"}}]'
    job, (line,) = fit_to_cpu(job_of(f"--stages {stages}"), bfloat16_units=True)
    assert job.stages[0].parallelism == Parallelism() and "=symmetric has no effect" in line


def test_emulated_float8_stays_on_a_cpu() -> None:
    job = job_of("--model.converters quantize.linear.float8 --quantize.linear.float8.emulate")
    assert fit_to_cpu(job, bfloat16_units=True) == (job, [])


def test_compilation_without_a_compiler_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    job, (line,) = fit_to_cpu(job_of("--compile.enable"), bfloat16_units=True)
    assert not job.compile.enable and "g++ was not found" in line
