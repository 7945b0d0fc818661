"""A key that is set and has no effect is a note, and no mistake."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.support.checking import EP, MODEL, job_of, problems
from titan_moe.checks.notes import fit_to_cpu, narrow_lines, notes
from titan_moe.config.job_config import JobConfig, Parallelism
from titan_moe.debug.router_load import WORKLOADS, Place, rows_of_experts
from titan_moe.models.config import ModelConfig
from titan_moe.models.registry import model_config
from titan_moe.prepare.job import check_all

DENSE = replace(MODEL, moe=None)
SPARSE = model_config("deepseek_v32", "debugmodel")


def noted(arguments: str, ranks: int = 1, model: ModelConfig = MODEL) -> list[str]:
    """Returns the notes about a configuration in which nothing is wrong."""
    assert problems(arguments, ranks, model) == []
    return notes(job_of(arguments), model, ranks)


_LATER = '[{"from_step":2,"parallelism":{"expert_parallel_degree":2}}]'
_EIGHT = "--training.steps 8 --lr_scheduler.warmup_steps"
_NEVER = f'{_EIGHT} 8 --stages [{{"from_step":9,"seq_len":8192}}]'
_LATE_CAPTURE = f"{_EIGHT} 8 --debug.capture_step 9 --compile.enable"
_FLOAT8 = "--model.converters quantize.linear.float8"
_PAIRS = "--p.pipeline_parallel_expert_parallel_overlap"
_DEDUPLICATED = f"{EP}_comm_backend deduplicated"
_BALANCED = f"{EP}_comm_backend balanced"
_HELPS_NOT = "parallelism.expert_parallel_comm_backend=balanced has no effect: "
_OF_NODE = f"ep 2 {EP}_ranks_per_node 2 {EP}_comm_backend"
_BASED = "--lora.rank 8 --checkpoint.enable --checkpoint.initial_load_path /"
_PARTS = (
    "--p.module_fqns_per_model_part="
    '[["tok_embeddings","layers.0","layers.1"],["layers.2","layers.3","norm","output"]]'
)


@pytest.mark.parametrize(
    ("arguments", "model", "line"),
    [
        ("--moe.row_alignment 16", DENSE, "moe.row_alignment=16 has no effect: deepseek_v3 debugm"),
        ("--debug.moe_force_load_balance", DENSE, "debug.moe_force_load_balance=true has no effec"),
        ("ep 2", DENSE, "parallelism.expert_parallel_degree=2 has no effect: deepseek_v3 debugmod"),
        (f"{EP}_comm_backend symmetric", DENSE, "parallelism.expert_parallel_comm_backend=symmet"),
        (f"{EP}_capacity_factor 1.5", MODEL, "parallelism.expert_parallel_capacity_factor=1.5 ha"),
        (f"{EP}_overlap true", MODEL, "parallelism.expert_parallel_overlap=true has no effect: e"),
        (f"ep 2 {EP}_overflow drop", MODEL, "parallelism.expert_parallel_overflow=drop has no ef"),
        (f"{_OF_NODE} standard", MODEL, "parallelism.expert_parallel_ranks_per_node=2 has no eff"),
        (f"{_OF_NODE} symmetric", MODEL, "parallelism.expert_parallel_ranks_per_node=2 has no eff"),
        ("--p.enable_async_tensor_parallel", MODEL, "parallelism.enable_async_tensor_parallel=tru"),
        (f"pp 2 {_PAIRS} false", MODEL, "parallelism.pipeline_parallel_expert_parallel_overlap=fa"),
        ("pp 2 --p.fsdp_accumulation reduce_each", MODEL, "parallelism.fsdp_accumulation=reduce_"),
        (
            f"pp 2 {_PARTS} --p.pipeline_parallel_layers_per_stage 2",
            MODEL,
            "parallelism.pipeline_parallel_layers_per_stage=2 has no effect: module_fqns_per_model",
        ),
        ("--training.mtp_loss_weight 0.1", MODEL, "training.mtp_loss_weight=0.1 has no effect: de"),
        ("--training.indexer_stage dense", MODEL, "training.indexer_stage=dense has no effect: de"),
        ("--training.indexer_stage dense --moe.bias_update_speed 1", SPARSE, "moe.bias_update_spe"),
        ("--lora.rank 8", MODEL, "lora.rank=8: adapters train beside random weights; checkpoint.i"),
        (f"{_BASED} --lora.rank 6", MODEL, "lora.rank=6: on a GPU each product of the experts"),
        (f"{_BASED} --moe.bias_update_speed 1", MODEL, "moe.bias_update_speed=1.0 has no effect: "),
        ("--moe.bias_momentum 0.5", MODEL, "moe.bias_momentum=0.5 has no effect: moe.bias_update="),
        ("--training.messages.max_refused 0.1", MODEL, "training.messages has no effect: training"),
        (_BALANCED, MODEL, f"{_HELPS_NOT}expert_parallel_degree is 1"),
        (f"ep 2 {_BALANCED} --debug.router_load W0", MODEL, f"{_HELPS_NOT}debug.router_load=W0"),
        (
            f"ep 2 {_BALANCED} --debug.moe_force_load_balance",
            MODEL,
            f"{_HELPS_NOT}debug.moe_force_load_balance=true gives each rank as many rows",
        ),
        ("--debug.router_load W2", DENSE, "debug.router_load=W2 has no effect: deepseek_v3 debugm"),
        ("--training.on_spike skip", MODEL, "training.on_spike=skip has no effect: training.spike"),
        ("--training.text_column body", MODEL, "training.text_column=body has no effect: the data"),
        ("--validation.text_column a", MODEL, "validation.text_column=a has no effect: validation"),
        (f"{_DEDUPLICATED} {EP}_capacity_factor 2", MODEL, "parallelism.expert_parallel_capaci"),
        ("--validation.dataset_path a", MODEL, "validation.dataset_path=a has no effect: validat"),
        ("--validation.held_out_every 5", MODEL, "validation.held_out_every=5 has no effect: val"),
        ("--validation.dataset a", MODEL, "validation.dataset=a has no effect: validation.enable"),
        ("--checkpoint.last_save_in_hf", MODEL, "checkpoint.last_save_in_hf=true has no effect: c"),
        (_NEVER, MODEL, "stages[0] (from_step=9) has no effect: training.steps=8 ends before it"),
        (_LATE_CAPTURE, MODEL, "debug.capture_step=9 has no effect: it is beyond training.steps=8"),
        (f"{_EIGHT} 40", MODEL, "lr_scheduler.warmup_steps=40: training.steps=8 ends at 0.2 of"),
        ("--checkpoint.load_only", MODEL, "checkpoint.load_only=true has no effect: checkpoint.en"),
        (f"{_EIGHT} 8 --debug.capture_step 9", MODEL, "debug.capture_step=9 has no effect:"),
        ("tp 2 ep 2 --comm.separate_reduce_scatter", MODEL, "comm.separate_reduce_scatter has n"),
        ("--comm.axes.cp.max_ctas 8", MODEL, "comm.axes.cp has no effect: the axis has one rank"),
        ("ep 2 --comm.axes.edp.max_ctas 8", MODEL, "comm.axes.edp has no effect: the axis has one"),
        ("--optimizer.muon_steps 6", MODEL, "optimizer.muon_steps=6 has no effect: optimizer.name"),
    ],
)  # fmt: skip
def test_key_without_effect_is_a_note(arguments: str, model: ModelConfig, line: str) -> None:
    (note,) = noted(arguments, ranks=2, model=model)
    assert note.startswith(line)


@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_balanced_has_no_effect_under_loads_that_fill_all_ranks(workload: str, ep: int) -> None:
    loads = [
        [rows_of_experts(workload, step, Place(n, ep, 64, 8, seed), 512) for n in range(ep)]
        for step, seed in product(range(8), range(4))
    ]
    ranks_SP = torch.tensor(loads).sum(1).view(len(loads), ep, -1).sum(-1)
    is_even = bool((ranks_SP.amax(1) < 1.01 * ranks_SP.float().mean(1)).all())
    lines = noted(f"ep {ep} {_BALANCED} --debug.router_load {workload}", ranks=ep)
    assert [line.startswith(_HELPS_NOT) for line in lines] == [True] * is_even


@pytest.mark.parametrize(
    "words",
    [
        "--parallelism.expert_parallel_degree 4",
        "--parallelism.expert_tensor_parallel_degree 3",
        "--debug.routing_replay /nowhere",
        "--debug.routing_record /",
        "--parallelism.expert_parallel_ranks_per_node 3",
        '--stages [{"from_step":2,"parallelism":{"expert_parallel_degree":64}}]',
    ],
)
def test_key_of_experts_stops_no_dense_model(words: str) -> None:
    dense = "--model.name qwen3 --model.flavor debugmodel --training.dataset synthetic"
    job, lines = check_all([*dense.split(), *words.split()], 2, 1, {})
    assert job.parallelism == Parallelism() and job.debug.routing_replay is None
    key, value = words[2:].split()
    assert f"{key}={value} has no effect: qwen3 debugmodel has no experts" in lines or job.stages


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--moe.row_alignment 16",
        _BASED,
        f"{_BASED} --lora.rank 6 --lora.targets attention",
        f"{_BASED} --lora.rank 6 --training.dtype float64",  # Every product is a loop.
        "--lora.rank 8 --checkpoint.enable --checkpoint.create_seed_checkpoint",
        f"ep 2 {EP}_capacity_factor 1.5 {EP}_overflow drop",
        f"ep 2 {EP}_ranks_per_node 2",  # The automatic choice reads it.
        f"{_EIGHT} 40 --lr_scheduler.total_steps 40",  # A later run goes on.
        _DEDUPLICATED,  # Where nothing travels all backends are alike.
        "--optimizer.muon_steps 6 --optimizer.name Muon",
        '--training.text_column a --training.blend [{"dataset":"json","dataset_path":"/"}]',
        "--training.text_column a --validation.enable --validation.dataset json",
        f"{EP}_overlap true --stages {_LATER}",
        "--comm.axes.fsdp.max_ctas 8 --comm.axes.edp.max_ctas 8",
        "--comm.separate_reduce_scatter",
        "tp 2 --comm.axes.sequence.max_ctas 8 --comm.axes.tp.max_ctas 8",
        f"--comm.axes.ep.max_ctas 8 --stages {_LATER}",
    ],
)
def test_key_with_effect_is_no_note(arguments: str) -> None:
    assert noted(arguments, ranks=2) == []


def test_adapters_that_go_on_have_weights_beside_them(tmp_path: Path) -> None:
    run = f"--lora.rank 8 --checkpoint.enable --job.dump_folder {tmp_path}"
    assert len(noted(run)) == 1
    (tmp_path / "checkpoint/step-2").mkdir(parents=True)
    assert noted(run) == []


def test_gpu_only_keys_are_switched_off_on_a_cpu() -> None:
    keys = (
        "--training.enable_cpu_offload --profiling.enable_memory_snapshot "
        f"--p.enable_async_tensor_parallel {EP}_comm_backend symmetric "
        f"{_FLOAT8} --comm.parameter_sms 16 --comm.axes.ep.max_ctas 8 --comm.split_communicators"
    )
    job, lines = fit_to_cpu(job_of(keys), bfloat16_units=True)
    assert job == JobConfig()
    assert 'comm.axes={"ep": {"max_ctas": 8}} has no effect on a CPU: options are NCCL\'s' in lines
    assert len(lines) == 8 and all(" has no effect on a CPU: " in line for line in lines)
    emulated = job_of(f"{_FLOAT8} --quantize.linear.float8.emulate")
    for kept in (job, emulated):
        assert fit_to_cpu(kept, bfloat16_units=True) == (kept, [])


def test_stages_lose_gpu_only_keys_too() -> None:
    stages = '[{"from_step":2,"parallelism":{"expert_parallel_comm_backend":"symmetric"}}]'
    job, (line,) = fit_to_cpu(job_of(f"--stages {stages}"), bfloat16_units=True)
    assert job.stages[0].parallelism == Parallelism() and "=symmetric has no effect" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", None),
        ("--training.dtype float64", None),
        ("--optimizer.state_dtype bfloat16", "optimizer.state_dtype=bfloat16: moments are kept"),
        ("--training.dtype bfloat16", "training.dtype=bfloat16: parameters and moments are kept"),
    ],
)
def test_parameters_or_moments_in_bfloat16_get_one_line(arguments: str, words: str | None) -> None:
    lines = narrow_lines(job_of(arguments))
    assert [line.startswith(words) for line in lines if words] == [True] * bool(words)
    assert bool(lines) == bool(words)


def test_compilation_without_a_compiler_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    job, (line,) = fit_to_cpu(job_of("--compile.enable"), bfloat16_units=True)
    assert not job.compile.enable and "g++ was not found" in line
