"""Rules across tables: a broken one is a line with a remedy."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.checking import ASYNC, EP, MODEL, SYMMETRIC, job_of, problems
from titan_moe.checks import parallelism
from titan_moe.checks.data import check_vocabulary
from titan_moe.checks.job import check
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import load_job, resolve
from titan_moe.config.pipeline import SCHEDULES
from titan_moe.models.registry import FAMILIES, model_config

# A key and its value, or a table and its degrees; then its legal values, or the reason and, after a
# colon or semicolon, the remedy.
WELL_FORMED = re.compile(
    r"[a-z_]+(\.[a-z_0-9]+(=\S+)?)?:? "
    r"(must be (-1 or at least 1|a positive integer N, .*)"
    r"|.+[:;] (choose|start it with|set|leave|add|keep|give|once is enough) ?.*)"
)
_GROUPED = '--model.converters ["quantize.grouped_mm.float8"]'
_INVERSE_SQRT = "--lr_scheduler.decay_type inverse_sqrt --lr_scheduler.warmup_steps 0"
_MX = '--model.converters ["quantize.grouped_mm.mx"] --quantize.linear.float8.emulate true'
_BOTH = "--model.converters quantize.grouped_mm.float8,quantize.grouped_mm.mx"
_LINEAR = '--model.converters ["quantize.linear.float8"] --training.local_batch_size 1'
_BLEND = '--training.blend [{"dataset":"stdlib"}]'
_TWO = '--training.blend [{"dataset":"stdlib"},{"dataset":"json","dataset_path":"b"}]'
_TALKS = "--training.dataset_format messages --training.epochs 2"
_ZBV = "pp 2 --p.pipeline_parallel_schedule ZBVZeroBubble"

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
    ("--comm.parameter_sms 4 --comm.axes.fsdp.min_ctas 5", 2, "min_ctas is above comm.parameter"),
    ("pp 2 --comm.split_communicators", 2, "stages of a pipeline may not: choose false, or para"),
    (f"{_ZBV} --activation_checkpoint.mode full", 2, "mode=full with pipeline_parallel_schedule="),
    (f"{_ZBV} --activation_checkpoint.mode none --compile.enable", 2, "makes one graph of: choose"),
    (f"tp 2 ep 2 {ASYNC} --compile.enable {SYMMETRIC}", 2, "need buffers of symmetric memory:"),
    (f"ep 2 {SYMMETRIC} --comm.share_gpus", 2, "which ranks of one GPU do not have: choose anoth"),
    (f"tp 2 {ASYNC} --compile.enable --comm.share_gpus", 2, "=true wants symmetric memory, which"),
    ("ep 3", 3, "parallelism.expert_parallel_degree=3 must divide num_experts=8: choose 1"),
    ("ep 4", 2, "expert_tensor_parallel_degree=1 must divide dp_shard 2 x cp 1 x tp 1 = 2: choose"),
    ("--p.expert_tensor_parallel_degree 3", 3, "must divide the experts' hidden_dim=256: choose 1"),
    (f"ep 2 {EP}_capacity_factor 1.5 {EP}_comm_backend deduplicated", 2, "bounds the buffers of"),
    (f"ep 2 {EP}_comm_backend deduplicated {EP}_ranks_per_node 3", 2, "must divide the 2 ranks"),
    ("--debug.router_load W2 --debug.moe_force_load_balance", 1, "both say where tokens go: cho"),
    ("--moe.bias_update quantile --moe.score sqrtsoftplus", 1, "wants scores between 0 and 1"),
    (f"ep 2 {SYMMETRIC} {EP}_overlap true", 2, "has one set of buffers, and parallelism.expert_"),
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
    (f"{_TALKS} {_TWO}", 1, "training.epochs=2: the sources of training.blend end at different"),
    ("--training.epochs 2", 1, "training.epochs=2 counts passes over conversations: set"),
    (f"{_TALKS} --training.mask_documents false", 1, "lets conversations attend to each other"),
    ("--training.dtype bfloat16 --training.mixed_precision_param float32", 1, "cannot restore par"),
    ("--optimizer.state_dtype bfloat16 --optimizer.beta2 0.999", 1, "changes a moment by less tha"),
    ("--training.dtype bfloat16 --optimizer.beta2 0.999", 1, "less than training.dtype=bfloat16"),
    (_INVERSE_SQRT, 1, "choose 1 or mor"),
    ("--profiling.enable_profiling --profiling.profile_freq 3", 1, "profiler_active: choose 4 or"),
    ("--compile.enable --debug.capture_step 3", 1, "looks into layers that compile.enable=true"),
    ("--checkpoint.create_seed_checkpoint", 1, "=true is not read without checkpoint.enable=true:"),
    ("--checkpoint.initial_load_path x", 1, "checkpoint.initial_load_path=x is not read without"),
    ("--checkpoint.enable --checkpoint.initial_load_in_hf", 1, "initial_load_in_hf=true needs a f"),
    ("--checkpoint.enable --checkpoint.last_save_in_hf --checkpoint.load_only", 1, "saves nothing"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "ranks", "words"), RULES)
def test_broken_rule_is_one_line_with_a_remedy(monkeypatch, arguments: str, ranks: int, words: str):
    monkeypatch.setattr(parallelism, "TORCH", "2.13.0")
    (line,) = problems(arguments, ranks)
    assert words in line and WELL_FORMED.fullmatch(line)


def test_a_further_dispatcher_has_no_bounded_buffers_until_the_rule_names_it() -> None:
    job = job_of(f"ep 2 {EP}_capacity_factor 1.5")
    further = job.with_values(parallelism={"expert_parallel_comm_backend": "further"})
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


@settings(max_examples=150)
@given(
    st.sampled_from(FAMILIES),
    st.integers(1, 8),
    # Most keys keep their defaults: configurations with one mistake are among those drawn.
    st.fixed_dictionaries({}, optional=_PARALLELISM),
    st.fixed_dictionaries({}, optional=_TRAINING),
)
@example("deepseek_v4", 1, {"expert_tensor_parallel_degree": 2, "context_parallel_degree": 2}, {})
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
        ("--checkpoint.enable --checkpoint.create_seed_checkpoint --training.dtype bfloat16", 1),
        (f"{_INVERSE_SQRT} --lr_scheduler.decay_ratio 0.5 --optimizer.state_dtype bfloat16", 1),
        ("cp 2 tp 4 --training.seq_len 8", 8),
        ("cp 4 tp 2 --p.context_parallel_rotate_method ulysses", 8),
        ("cp 3 --p.context_parallel_rotate_method ring --training.seq_len 6", 3),
        ("pp 2 --validation.local_batch_size 3 --validation.enable", 2),
        ("tp 4 cp 4 pp 4", 64),
        (f"tp 2 ep 2 {ASYNC} --activation_checkpoint.mode full", 2),
        (f"ep 2 {EP}_capacity_factor 1.5 {EP}_overflow drop", 2),
        (f"ep 2 {SYMMETRIC} {EP}_capacity_factor 1.5", 2),
        (_MX, 1),
    ],
)
def test_legal_configuration_has_no_problems(arguments: str, ranks: int) -> None:
    assert problems(arguments, ranks) == []


def test_a_split_backward_wants_torch_2_13(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(f"{_ZBV} --activation_checkpoint.mode none")
    monkeypatch.setattr(parallelism, "TORCH", "2.13.0+cu130")
    assert check(job, MODEL, 2) == []
    monkeypatch.setattr(parallelism, "TORCH", "2.12.1+cu130")
    (line,) = check(job, MODEL, 2)
    assert "and torch 2.12.1+cu130 cannot split" in line and WELL_FORMED.fullmatch(line)


def test_all_problems_are_reported_at_once() -> None:
    assert len(problems("--checkpoint.load_step 4 --training.seq_len 9999 tp 3", 3)) == 3
    assert len(problems(f"ep 3 {SYMMETRIC}", 3)) == 2


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


def test_routing_folders_that_cannot_be_written_or_replayed_are_refused(tmp_path: Path) -> None:
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
        (f"{replay} --debug.routing_record {full}/../record", "is also debug.routing_replay"),
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
