"""Rules across tables: a broken one is a line with a remedy, a key without effect is a note."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_moe.config.checks.data import check_vocabulary
from titan_moe.config.checks.job import check
from titan_moe.config.checks.notes import fit_to_cpu, narrow_lines, notes
from titan_moe.config.job_config import JobConfig, Parallelism
from titan_moe.config.parse import load_job, resolve
from titan_moe.config.pipeline import SCHEDULES
from titan_moe.models.config import GQAConfig, ModelConfig
from titan_moe.models.registry import FAMILIES, model_config
from titan_moe.moe.config import MoEConfig
from titan_moe.train import check_all

MODEL = replace(
    model_config("deepseek_v3", "debugmodel"),
    vocab_size=272,
    dim=64,
    num_layers=4,
    attention=GQAConfig(num_heads=16, num_kv_heads=8, head_dim=4),
    hidden_dim=512,
    moe=MoEConfig(num_experts=8, top_k=2, hidden_dim=256, num_shared_experts=1),
)
# A key and its value, or a table and its degrees; then its legal values, or the reason and, after a
# colon or semicolon, the remedy.
WELL_FORMED = re.compile(
    r"[a-z_]+(\.[a-z_0-9]+(=\S+)?)?:? "
    r"(must be (-1 or at least 1|a positive integer N, .*)"
    r"|.+[:;] (choose|start it with|set|leave|add|keep|give|once is enough) ?.*)"
)
DENSE = replace(MODEL, moe=None)
SPARSE = model_config("deepseek_v32", "debugmodel")
_SHORT = {
    **{"pp": "pipeline_parallel_degree", "cp": "context_parallel_degree"},
    **{"tp": "tensor_parallel_degree", "ep": "expert_parallel_degree"},
}


def job_of(arguments: str) -> JobConfig:
    """Loads a command line in which `pp 2` is --parallelism.pipeline_parallel_degree 2.

    --p.key is --parallelism.key.
    """
    words = [f"--p.{_SHORT[word]}" if word in _SHORT else word for word in arguments.split()]
    return load_job([word.replace("--p.", "--parallelism.") for word in words])


def problems(arguments: str, ranks: int = 1, model: ModelConfig = MODEL) -> list[str]:
    return check(job_of(arguments), model, ranks)


def noted(arguments: str, ranks: int = 1, model: ModelConfig = MODEL) -> list[str]:
    """Returns the notes about a configuration in which nothing is wrong."""
    assert problems(arguments, ranks, model) == []
    return notes(job_of(arguments), model, ranks)


_GROUPED = '--model.converters ["quantize.grouped_mm.float8"]'
_MX = '--model.converters ["quantize.grouped_mm.mx"] --quantize.linear.float8.emulate true'
_BOTH = "--model.converters quantize.grouped_mm.float8,quantize.grouped_mm.mx"
_LINEAR = '--model.converters ["quantize.linear.float8"] --training.local_batch_size 1'
_BLEND = '--training.blend [{"dataset":"stdlib"}]'
_ZBV = "pp 2 --p.pipeline_parallel_schedule ZBVZeroBubble"
_ASYNC = "--p.enable_async_tensor_parallel true"
_EP = "--p.expert_parallel"
_SYMMETRIC = f"{_EP}_comm_backend symmetric"

# Arguments, ranks, and words of the one line.
RULES = [
    ("--p.data_parallel_shard_degree 8", 2, "dp_shard 8 = 8 ranks, but this run has 2: start it"),
    ("--p.data_parallel_replicate_degree 4", 6, "4 = 4 must divide the 6 ranks of this run: start"),
    ("tp 3 --training.seq_len 96", 3, "must divide num_heads=16 and num_kv_heads=8 and vocab_size"),
    ("tp 16", 16, "=16 must divide num_kv_heads=8 of deepseek_v3 debugmodel: choose 1, 2, 4 or 8"),
    ("tp 4 cp 2 --training.seq_len 4", 8, "multiple of 8, for context"),
    ("cp 2 --validation.seq_len 66 --validation.enable", 2, "validation.seq_len=66 must be a mu"),
    (
        "cp 16 --p.context_parallel_rotate_method ulysses",
        16,
        "num_heads=16 / tp 1 and num_kv_heads=8 / tp 1: choose 1, 2, 4 or 8, or set parallelism.c",
    ),
    ("pp 8", 8, "pipeline_parallel_degree=8 with 1F1B makes 8 stages of 4 layers"),
    (f"{_ZBV} --activation_checkpoint.mode full", 2, "mode=full with pipeline_parallel_schedule="),
    (f"{_ZBV} --activation_checkpoint.mode none --compile.enable", 2, "makes one graph of: choose"),
    (f"tp 2 ep 2 {_ASYNC} --compile.enable {_SYMMETRIC}", 2, "want symmetric memory of two kinds:"),
    (f"ep 2 {_SYMMETRIC} --comm.share_gpus", 2, "which ranks of one GPU do not have: choose anoth"),
    (f"tp 2 {_ASYNC} --compile.enable --comm.share_gpus", 2, "=true wants symmetric memory, which"),
    ("ep 3", 3, "parallelism.expert_parallel_degree=3 must divide num_experts=8: choose 1"),
    ("ep 4", 2, "expert_tensor_parallel_degree=1 must divide dp_shard 2 x cp 1 x tp 1 = 2: choose"),
    ("--p.expert_tensor_parallel_degree 3", 3, "must divide the experts' hidden_dim=256: choose 1"),
    (f"ep 2 {_EP}_capacity_factor 1.5 {_EP}_comm_backend deduplicated", 2, "bounds the buffers of"),
    (f"ep 2 {_EP}_comm_backend deduplicated {_EP}_ranks_per_node 3", 2, "must divide the 2 ranks"),
    (f"ep 2 {_SYMMETRIC} {_EP}_overlap true", 2, "has one set of buffers, and parallelism.expert_"),
    (f"{_GROUPED} --p.expert_tensor_parallel_degree 32", 32, "float8 wants multiples of 16, and t"),
    (f"{_MX} --p.expert_tensor_parallel_degree 16", 16, "quantize.grouped_mm.mx wants multiples o"),
    (_BOTH, 1, "are for the same products: choose one"),
    (f"{_GROUPED} --quantize.linear.float8.emulate", 1, "torchao does not emulate it: leave it"),
    (f"{_LINEAR} --training.seq_len 40", 1, "1 sequences / cp x tp 1 are 40 tokens, and quantize."),
    (f"{_LINEAR} --training.mixed_precision_param float32", 1, "float8 products go with"),
    ("--training.global_batch_size 20 --training.local_batch_size 4", 4, "_size=1, or choose 16"),
    ("--training.seq_len 8192", 1, "exceeds max_seq_len=4096 of deepseek_v3 debugmodel: choose at"),
    ("--validation.enable --validation.seq_len 8192", 1, "validation.seq_len=8192 exceeds max_s"),
    ("--validation.enable --validation.dataset_path a", 1, "dataset_path='a' is not read without"),
    (f"{_BLEND} --training.dataset synthetic", 1, "training.dataset='synthetic' is not read besid"),
    (f"{_BLEND} --training.dataset_path a", 1, "training.dataset_path='a' is not read beside"),
    ("--training.dtype bfloat16 --training.mixed_precision_param float32", 1, "cannot restore par"),
    ("--optimizer.state_dtype bfloat16 --optimizer.beta2 0.999", 1, "changes a moment by less tha"),
    ("--training.dtype bfloat16 --optimizer.beta2 0.999", 1, "less than training.dtype=bfloat16"),
    ("--profiling.enable_profiling --profiling.profile_freq 3", 1, "profiler_active: choose 4 or"),
    ("--compile.enable --debug.capture_step 3", 1, "looks into layers that compile.enable=true"),
    ("--checkpoint.create_seed_checkpoint", 1, "=true is not read without checkpoint.enable=true:"),
    ("--checkpoint.initial_load_path x", 1, "checkpoint.initial_load_path=x is not read without"),
    ("--checkpoint.enable --checkpoint.initial_load_in_hf", 1, "initial_load_in_hf=true needs a f"),
    ("--checkpoint.enable --checkpoint.last_save_in_hf --checkpoint.load_only", 1, "saves nothing"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "ranks", "words"), RULES)
def test_broken_rule_is_one_line_with_a_remedy(arguments: str, ranks: int, words: str) -> None:
    (line,) = problems(arguments, ranks)
    assert words in line and WELL_FORMED.fullmatch(line)


def test_a_further_dispatcher_has_no_bounded_buffers_until_the_rule_names_it() -> None:
    job = job_of(f"ep 2 {_EP}_capacity_factor 1.5")
    backend = {"expert_parallel_comm_backend": "further"}
    further = job.model_copy(update={"parallelism": job.parallelism.model_copy(update=backend)})
    (line,) = check(further, MODEL, 2)
    assert "not of further: choose one" in line


_DEGREE = st.integers(1, 8)
_PARALLELISM = {
    "pipeline_parallel_degree": _DEGREE,
    "data_parallel_replicate_degree": _DEGREE,
    "data_parallel_shard_degree": st.just(-1) | _DEGREE,
    "context_parallel_degree": _DEGREE,
    "context_parallel_rotate_method": st.sampled_from(["allgather", "ulysses", "ring"]),
    "tensor_parallel_degree": _DEGREE,
    "expert_parallel_degree": _DEGREE,
    "expert_tensor_parallel_degree": _DEGREE,
    "expert_parallel_comm_backend": st.sampled_from(["auto", "standard", "deduplicated"]),
    "expert_parallel_capacity_factor": st.sampled_from([1.0, 1.5]),
    "pipeline_parallel_schedule": st.sampled_from(list(SCHEDULES)),
    "pipeline_parallel_microbatch_size": st.integers(1, 3),
    "pipeline_parallel_layers_per_stage": st.none() | st.integers(1, 3),
}
_TRAINING = {
    "local_batch_size": _DEGREE,
    "global_batch_size": st.just(-1) | st.integers(1, 64),
    "seq_len": st.integers(1, 64),
}


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(FAMILIES),
    st.integers(1, 8),
    # Most keys keep their defaults: configurations with one mistake are among those drawn.
    st.fixed_dictionaries({}, optional=_PARALLELISM),
    st.fixed_dictionaries({}, optional=_TRAINING),
)
def test_any_layout_is_legal_or_refused_with_a_remedy(
    family: str, ranks: int, parallelism: dict[str, object], training: dict[str, object]
) -> None:
    model = {"name": family, "flavor": "gate"}
    tables = {"model": model, "parallelism": parallelism, "training": training}
    job = JobConfig.model_validate(tables)
    lines = check(job, model_config(family, "gate"), ranks)
    assert [line for line in lines if not WELL_FORMED.fullmatch(line)] == []
    if not lines:
        resolve(job, ranks)
    for line in lines:
        for change in _remedies(line):
            tables = {name: getattr(job, name).model_dump() for name in ("parallelism", "training")}
            for key, value in change.items():
                table, _, name = key.rpartition(".")
                tables[table or "parallelism"][name] = value
            world_size = int(tables["parallelism"].pop("ranks", ranks))
            changed = JobConfig.model_validate({"model": model, **tables})
            left = check(changed, model_config(family, "gate"), world_size)
            assert len(left) < len(lines), (line, change, left)


def _remedies(line: str) -> Iterator[dict[str, object]]:
    """Yields the new values of keys that a line names as its remedies."""
    key, remedies = line.partition("=")[0], line.rpartition(": ")[2]
    for remedy in remedies.split(", or "):
        if re.fullmatch(r"choose \d+(, \d+)*( or \d+)?", remedy):
            yield from ({key: int(value)} for value in re.findall(r"\d+", remedy))
        elif changes := re.findall(r"((?:training|parallelism)\.\w+|NGPU)=(\S+)", remedy):
            yield {key.replace("NGPU", "ranks"): value for key, value in changes}


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        ("--training.seq_len 4096 --validation.seq_len 4096 --validation.enable", 1),
        ("cp 2 --validation.seq_len 999999", 2),
        ("--checkpoint.enable --checkpoint.create_seed_checkpoint", 1),
        ("--training.dtype bfloat16", 1),
        ("--optimizer.state_dtype bfloat16", 1),
        ("cp 2 tp 4 --training.seq_len 8", 8),
        ("cp 4 tp 2 --p.context_parallel_rotate_method ulysses", 8),
        ("cp 3 --p.context_parallel_rotate_method ring --training.seq_len 6", 3),
        (f"{_ZBV} --activation_checkpoint.mode none", 2),
        ("pp 2 --validation.local_batch_size 3 --validation.enable", 2),
        ("tp 4 cp 4 pp 4", 64),
        (f"tp 2 ep 2 {_ASYNC} --activation_checkpoint.mode full", 2),
        (f"ep 2 {_EP}_capacity_factor 1.5 {_EP}_overflow drop", 2),
        (f"ep 2 {_SYMMETRIC} {_EP}_capacity_factor 1.5", 2),
        (_MX, 1),
    ],
)
def test_legal_configuration_has_no_problems(arguments: str, ranks: int) -> None:
    assert problems(arguments, ranks) == []


def test_all_problems_are_reported_at_once() -> None:
    assert len(problems("--checkpoint.load_step 4 --training.seq_len 9999 tp 3", 3)) == 3
    assert len(problems(f"ep 3 {_SYMMETRIC}", 3)) == 2


def test_tensor_parallelism_divides_only_what_the_model_has() -> None:
    assert MODEL.moe is not None
    moe = replace(MODEL.moe, num_shared_experts=0, hidden_dim=7)
    assert problems("tp 8", 8, replace(MODEL, hidden_dim=7, num_dense_layers=0, moe=moe)) == []


def test_expert_biases_want_the_models_dim_to_divide() -> None:
    assert MODEL.moe is not None
    moe, cut = replace(MODEL.moe, projection_bias=True), "--p.expert_tensor_parallel_degree 4"
    assert problems(cut, 4, replace(MODEL, moe=moe)) == []
    (line,) = problems(cut, 4, replace(MODEL, moe=moe, dim=66))
    assert "must divide dim=66: choose 1 or 2" in line


def test_multi_token_prediction_wants_sequences_longer_than_it_looks_ahead() -> None:
    (line,) = problems("--training.seq_len 2", 1, replace(MODEL, num_mtp_layers=2))
    assert "more than the 2 tokens ahead" in line and "choose at least 3, or fewer layers" in line
    assert problems("--training.seq_len 3", 1, replace(MODEL, num_mtp_layers=2)) == []


def test_routing_folders_that_cannot_be_meant(tmp_path: Path) -> None:
    full, record = tmp_path / "full", tmp_path / "record"
    for folder, name in ((full, "notes.txt"), (record, "record.json")):
        folder.mkdir()
        (folder / name).touch()
    replay = f"--debug.routing_replay {record}"
    for arguments, words in (
        (f"--debug.routing_record {full}", "holds other files: choose a new folder"),
        (f"--debug.routing_record {full}/notes.txt", "notes.txt holds other files"),
        (f"--job.dump_folder {record}/a --debug.routing_record {record}", "holds job.dump_folder"),
        (f"--debug.routing_replay {tmp_path}/none", "has no record.json: name the folder of a"),
        (f"{replay} --debug.routing_record {full}/../record", "is what is replayed: choose"),
        (f"{replay} --debug.moe_force_load_balance", "both say where tokens go: choose one"),
    ):
        (line,) = problems(arguments)
        assert words in line
    assert problems(f"--debug.routing_record {tmp_path}/new {replay}") == []
    assert problems(f"--debug.routing_record {record}") == []


def test_tokenizer_must_fit_the_vocabulary() -> None:
    job = load_job(["--model.tokenizer_path", "big"])
    assert check_vocabulary(job, MODEL, 272) == []
    (line,) = check_vocabulary(job, MODEL, 273)
    assert "model.tokenizer_path=big" in line and "273" in line and "vocab_size=272" in line


def test_global_batch_is_pinned_for_the_ranks_of_the_run() -> None:
    job = job_of("--p.data_parallel_replicate_degree 2")
    pinned = resolve(job, 8)
    assert pinned.training.global_batch_size == 8 * job.training.local_batch_size
    assert resolve(pinned, 4) == pinned


@pytest.mark.parametrize(
    ("stages", "line"),
    [
        (
            '[{"from_step":9,"seq_len":32},{"from_step":9,"seq_len":64}]',
            "stages[1].from_step=9 must be more than stages[0].from_step=9: name the stages in the "
            "order of their steps",
        ),
        (
            '[{"from_step":5,"seq_len":5000}]',
            "stages[0] (from_step=5): training.seq_len=5000 exceeds max_seq_len=4096 of "
            "deepseek_v3 debugmodel: choose at most 4096",
        ),
        (  # The batch is that of the first stage, which nothing names.
            '[{"from_step":5,"local_batch_size":3}]',
            "stages[0] (from_step=5): training.global_batch_size=32 must be a multiple of "
            "local_batch_size 3 x 4 data ranks = 12: set training.local_batch_size=2, or choose 24",
        ),
        (
            '[{"from_step":5,"parallelism":{"context_parallel_degree":8}}]',
            "stages[0] (from_step=5): parallelism: cp 8 = 8 must divide the 4 ranks of this run: "
            "start it with NGPU=8 (--ranks 8)",
        ),
    ],
)
def test_stage_that_cannot_run_is_one_line(stages: str, line: str) -> None:
    arguments = f"--training.steps 100 --training.seq_len 64 --stages {stages}"
    assert check(job_of(arguments), MODEL, 4) == [line]


def test_mistake_of_the_job_is_not_repeated_for_its_stages() -> None:
    stages = '[{"from_step":5,"global_batch_size":64}]'
    (line,) = problems(f"--training.seq_len 5000 --stages {stages}")
    assert line.startswith("training.seq_len=5000 exceeds")


_LATER = '[{"from_step":2,"parallelism":{"expert_parallel_degree":2}}]'
_NEVER = '--training.steps 8 --stages [{"from_step":9,"seq_len":8192}]'
_LATE_CAPTURE = "--training.steps 8 --debug.capture_step 9 --compile.enable"
_DEDUPLICATED = f"{_EP}_comm_backend deduplicated"
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
        (f"{_EP}_comm_backend symmetric", DENSE, "parallelism.expert_parallel_comm_backend=symmet"),
        (f"{_EP}_capacity_factor 1.5", MODEL, "parallelism.expert_parallel_capacity_factor=1.5 ha"),
        (f"{_EP}_overlap true", MODEL, "parallelism.expert_parallel_overlap=true has no effect: e"),
        (f"ep 2 {_EP}_overflow drop", MODEL, "parallelism.expert_parallel_overflow=drop has no ef"),
        *(
            (
                f"ep 2 {_EP}_comm_backend {backend} {_EP}_ranks_per_node 2",
                MODEL,
                "parallelism.expert_parallel_ranks_per_node=2 has no effect: expert_parallel_comm_",
            )
            for backend in ("standard", "symmetric")
        ),
        ("--p.enable_async_tensor_parallel", MODEL, "parallelism.enable_async_tensor_parallel=tru"),
        ("pp 2 --p.fsdp_accumulation reduce_each", MODEL, "parallelism.fsdp_accumulation=reduce_"),
        (
            f"pp 2 {_PARTS} --p.pipeline_parallel_layers_per_stage 2",
            MODEL,
            "parallelism.pipeline_parallel_layers_per_stage=2 has no effect: module_fqns_per_model",
        ),
        ("--training.mtp_loss_weight 0.1", MODEL, "training.mtp_loss_weight=0.1 has no effect: de"),
        ("--training.indexer_stage dense", MODEL, "training.indexer_stage=dense has no effect: de"),
        ("--training.indexer_stage dense --moe.bias_update_speed 1", SPARSE, "moe.bias_update_spe"),
        ("--training.on_spike skip", MODEL, "training.on_spike=skip has no effect: training.spike"),
        ("--training.text_column body", MODEL, "training.text_column=body has no effect: the data"),
        ("--validation.text_column a", MODEL, "validation.text_column=a has no effect: validation"),
        (f"{_DEDUPLICATED} {_EP}_capacity_factor 2", MODEL, "parallelism.expert_parallel_capaci"),
        ("--validation.dataset_path a", MODEL, "validation.dataset_path=a has no effect: validat"),
        ("--validation.dataset a", MODEL, "validation.dataset=a has no effect: validation.enable"),
        ("--checkpoint.last_save_in_hf", MODEL, "checkpoint.last_save_in_hf=true has no effect: c"),
        (_NEVER, MODEL, "stages[0] (from_step=9) has no effect: training.steps=8 ends before it"),
        (_LATE_CAPTURE, MODEL, "debug.capture_step=9 has no effect: it is beyond training.steps=8"),
        ("--checkpoint.load_only", MODEL, "checkpoint.load_only=true has no effect: checkpoint.en"),
        ("--debug.capture_step 9 --training.steps 8", MODEL, "debug.capture_step=9 has no effect:"),
        ("--optimizer.muon_steps 6", MODEL, "optimizer.muon_steps=6 has no effect: optimizer.name"),
    ],
)  # fmt: skip
def test_key_without_effect_is_a_note(arguments: str, model: ModelConfig, line: str) -> None:
    (note,) = noted(arguments, ranks=2, model=model)
    assert note.startswith(line)


@pytest.mark.parametrize(
    "words",
    [
        *(
            "--parallelism.expert_parallel_degree 4",
            "--parallelism.expert_tensor_parallel_degree 3",
        ),
        *("--debug.routing_replay /nowhere", "--debug.routing_record /"),
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
        f"ep 2 {_EP}_capacity_factor 1.5 {_EP}_overflow drop",
        f"ep 2 {_EP}_ranks_per_node 2",  # The automatic choice reads it.
        _DEDUPLICATED,  # Where nothing travels all backends are alike.
        "--optimizer.muon_steps 6 --optimizer.name Muon",
        '--training.text_column a --training.blend [{"dataset":"json","dataset_path":"/"}]',
        "--training.text_column a --validation.enable --validation.dataset json",
        f"{_EP}_overlap true --stages {_LATER}",
    ],
)
def test_key_with_effect_is_no_note(arguments: str) -> None:
    assert noted(arguments, ranks=2) == []


def test_gpu_only_keys_are_switched_off_on_a_cpu() -> None:
    keys = (
        "--training.enable_cpu_offload --profiling.enable_memory_snapshot "
        f"--p.enable_async_tensor_parallel {_EP}_comm_backend symmetric "
        "--model.converters quantize.linear.float8 --comm.parameter_sms 16"
    )
    job, lines = fit_to_cpu(job_of(keys), bfloat16_units=True)
    assert job == JobConfig()
    assert len(lines) == 6 and all(" has no effect on a CPU: " in line for line in lines)
    assert fit_to_cpu(job, bfloat16_units=True) == (job, [])


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


def test_emulated_float8_stays_on_a_cpu() -> None:
    job = job_of("--model.converters quantize.linear.float8 --quantize.linear.float8.emulate")
    assert fit_to_cpu(job, bfloat16_units=True) == (job, [])


def test_compilation_without_a_compiler_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    job, (line,) = fit_to_cpu(job_of("--compile.enable"), bfloat16_units=True)
    assert not job.compile.enable and "g++ was not found" in line


def test_segments_of_recurrent_layers_hold_what_a_convolution_sees() -> None:
    def lines(seq_len: int, tp: int = 1, **more: Any) -> list[str]:
        degrees = {"context_parallel_degree": 8, "tensor_parallel_degree": tp}
        tables = {"parallelism": degrees, "training": {"seq_len": seq_len}, **more}
        model = {"name": "qwen3_next", "flavor": "gate"}
        job = JobConfig.model_validate({"model": model, **tables})
        return check(job, model_config("qwen3_next", "gate"), 8 * tp)

    (line,) = lines(32)
    assert "training.seq_len=32 in 16 segments" in line and "choose 48 or more" in line
    assert lines(48) == []
    (line,) = lines(48, validation={"enable": True, "seq_len": 32})
    assert line.startswith("validation.seq_len=32 in 16 segments")
    (line,) = lines(48, stages=[{"from_step": 5, "seq_len": 32}])
    assert "from_step=5" in line and "training.seq_len=32 in 16 segments" in line
    assert any("recurrent layers' key heads=8" in line for line in lines(768, tp=16))
