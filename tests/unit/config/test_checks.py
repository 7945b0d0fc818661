"""Rules across tables: every broken one gives its one line."""

import importlib.util
from pathlib import Path

import pytest

from tests.support.config_checks import Experts, Shape, problems
from titan_moe.config.checks.job import check, check_vocabulary
from titan_moe.config.parse import load_job
from titan_moe.config.resolve import resolve

_FLOAT8 = '--model.converters ["quantize.linear.float8","quantize.grouped_mm.float8"]'
_EMULATED = f"{_FLOAT8} --quantize.linear.float8.emulate true"

RULES = [
    (
        "--parallelism.expert_parallel_degree 3",
        3,
        "parallelism.expert_parallel_degree=3 must divide num_experts=8: choose 1, 2, 4 or 8",
    ),
    (
        "--parallelism.data_parallel_shard_degree 8",
        2,
        "parallelism: dp_shard 8 = 8 ranks, but this run has 2: start it with NGPU=8, or set "
        "parallelism.data_parallel_shard_degree=-1 to take what is there",
    ),
    (
        "--parallelism.data_parallel_replicate_degree 4",
        6,
        "parallelism: dp_replicate 4 = 4 must divide the 6 ranks of this run: start it with a "
        "multiple, such as NGPU=4",
    ),
    (
        "--parallelism.data_parallel_shard_degree 0",
        1,
        "parallelism.data_parallel_shard_degree=0 must be -1 or at least 1",
    ),
    (
        "--parallelism.expert_parallel_degree 4",
        2,
        "parallelism.expert_parallel_degree=4 x expert_tensor_parallel_degree=1 must divide "
        "dp_shard 2 x cp 1 x tp 1 = 2: choose 1 or 2",
    ),
    (
        "--training.global_batch_size 20 --training.local_batch_size 4",
        4,
        "training.global_batch_size=20 must be a multiple of local_batch_size 4 x 4 data ranks = "
        "16: choose 16",
    ),
    (
        "--training.global_batch_size 0",
        1,
        "training.global_batch_size=0 must be -1 or at least 1",
    ),
    ("--validation.steps -2", 1, "validation.steps=-2 must be -1 or at least 1"),
    (
        "--parallelism.expert_tensor_parallel_degree 3",
        3,
        "parallelism.expert_tensor_parallel_degree=3 must divide the experts' hidden_dim=256: "
        "choose a divisor such as 1, 2, 4, 8",
    ),
    (
        "--training.seq_len 8192",
        1,
        "training.seq_len=8192 exceeds max_seq_len=4096 of deepseek_v3 debugmodel: choose at most "
        "4096",
    ),
    ("--validation.seq_len 8192", 1, "validation.seq_len=8192 exceeds max_seq_len=4096"),
    (
        "--compile.enable --activation_checkpoint.selective_ac_option op",
        1,
        "activation_checkpoint.selective_ac_option='op' keeps results of operations that "
        "compile.enable=true fuses: choose 1, or activation_checkpoint.mode=full or none",
    ),
    (
        f"{_FLOAT8} --training.mixed_precision_param bfloat16",
        1,
        "model.converters: a CPU has no float8 units: set quantize.linear.float8.emulate=true to "
        "see the rounding, or leave it out",
    ),
    (
        f"{_EMULATED} --parallelism.expert_tensor_parallel_degree 32",
        32,
        "model.converters=quantize.grouped_mm.float8 wants multiples of 16, and the experts' "
        "hidden_dim / etp 32 of deepseek_v3 debugmodel is 8: leave it out",
    ),
    (
        "--compile.enable --parallelism.pipeline_parallel_degree 2 --training.local_batch_size 8 "
        "--parallelism.pipeline_parallel_schedule ZBVZeroBubble --activation_checkpoint.mode none",
        2,
        "parallelism.pipeline_parallel_schedule=ZBVZeroBubble splits the backward, which "
        "compile.enable=true makes one graph of: choose 1F1B or",
    ),
    (
        "--compile.enable --debug.capture_step 3",
        1,
        "debug.capture_step=3 looks into layers that compile.enable=true fuses: choose one",
    ),
    (
        "--training.enable_cpu_offload",
        1,
        "training.enable_cpu_offload=true needs a CUDA GPU, and none was found: choose false",
    ),
    (
        "--training.dtype bfloat16 --training.mixed_precision_param float32",
        1,
        "training.mixed_precision_param=float32 cannot restore parameters stored with "
        "training.dtype=bfloat16: choose training.dtype=float32",
    ),
    (
        "--activation_checkpoint.selective_ac_option 0",
        1,
        "activation_checkpoint.selective_ac_option='0' must be a positive integer N, to recompute "
        "every N-th layer, or 'op'",
    ),
    (
        "--profiling.enable_profiling --profiling.profile_freq 3",
        1,
        "profiling.profile_freq=3 must be at least profiler_warmup 3 + profiler_active 1 = 4",
    ),
    (
        "--checkpoint.create_seed_checkpoint",
        1,
        "checkpoint.create_seed_checkpoint=true has no effect without checkpoint.enable=true",
    ),
    ("--checkpoint.initial_load_path x", 1, "checkpoint.initial_load_path=x has no effect without"),
]


# "tp 3" stands for --parallelism.tensor_parallel_degree 3; the run has as many ranks as it takes.
PARALLEL_RULES = [
    (
        "tp 3 --training.seq_len 96",
        "parallelism.tensor_parallel_degree=3 must divide num_heads=16, num_kv_heads=8, "
        "vocab_size=272, hidden_dim=512 and the shared experts' hidden_dim=256 of deepseek_v3 "
        "debugmodel: choose 1, 2, 4 or 8",
    ),
    (
        "tp 16",
        "parallelism.tensor_parallel_degree=16 must divide num_kv_heads=8 of deepseek_v3 "
        "debugmodel: choose 1, 2, 4 or 8",
    ),
    (
        "cp 2 --training.seq_len 102",
        "training.seq_len=102 must be a multiple of 4, since context_parallel_degree=2 cuts it in "
        "2 x cp: choose 100 or 104, or parallelism.context_parallel_load_balancer=none",
    ),
    (
        "cp 2 --training.seq_len 101",
        "training.seq_len=101 must be a multiple of 4, since context_parallel_degree=2 cuts it in "
        "2 x cp: choose 100 or 104",
    ),
    (
        "cp 4 --parallelism.context_parallel_load_balancer none --training.seq_len 4094",
        "training.seq_len=4094 must be a multiple of 4, since context_parallel_degree=4: choose "
        "4092 or 4096",
    ),
    (
        "tp 4 --training.seq_len 4095",
        "training.seq_len=4095 must be a multiple of 4, since tensor_parallel_degree=4: choose "
        "4092 or 4096",
    ),
    (
        "tp 4 cp 2 --training.seq_len 4 --validation.seq_len 8",
        "training.seq_len=4 must be a multiple of 8, since context_parallel_degree=2 cuts it in 2 "
        "x cp and tensor_parallel_degree=4: choose 8",
    ),
    ("cp 2 --validation.seq_len 66", "validation.seq_len=66 must be a multiple of 4"),
    (
        "cp 16 --parallelism.context_parallel_rotate_method ulysses",
        "parallelism.context_parallel_degree=16 with context_parallel_rotate_method=ulysses must "
        "divide num_kv_heads 8 / tp 1 = 8: choose 1, 2, 4 or 8, or "
        "context_parallel_rotate_method=allgather or ring",
    ),
    (
        "cp 8 tp 4 --parallelism.context_parallel_rotate_method ulysses",
        "must divide num_heads 16 / tp 4 = 4 and num_kv_heads 8 / tp 4 = 2: choose 1 or 2, or",
    ),
    ("pp 8", "parallelism.pipeline_parallel_degree=8 with 1F1B makes 8 stages of 4 layers"),
    (
        "pp 4 --training.local_batch_size 2",
        "training.local_batch_size=2 makes 2 microbatches of pipeline_parallel_microbatch_size=1: "
        "pipeline_parallel_schedule=1F1B wants at least as many microbatches as its 4 stages",
    ),
    (
        "pp 2 --parallelism.pipeline_parallel_microbatch_size 3",
        "training.local_batch_size=8 must be a multiple of "
        "parallelism.pipeline_parallel_microbatch_size=3",
    ),
    (
        "pp 2 --parallelism.pipeline_parallel_schedule ZBVZeroBubble "
        "--activation_checkpoint.mode full",
        "activation_checkpoint.mode=full with pipeline_parallel_schedule=ZBVZeroBubble, which "
        "splits the backward, would recompute layers several times: choose "
        "activation_checkpoint.mode=none, or one of 1F1B, Interleaved1F1B, GPipe, LoopedBFS",
    ),
    (
        'pp 2 --parallelism.module_fqns_per_model_part=[["tok_embeddings","layers.0","layers.1"],'
        '["layers.2","norm","output"]]',
        "parallelism.module_fqns_per_model_part names 'layers.3' 0 times: add it",
    ),
    (
        'pp 2 --parallelism.module_fqns_per_model_part=[["tok_embeddings","layers.0","layers.1"],'
        '["layers.2","layers.3","norm","output"]] '
        "--parallelism.pipeline_parallel_layers_per_stage 2",
        "parallelism.pipeline_parallel_layers_per_stage=2 has no effect beside "
        "module_fqns_per_model_part: leave one of them out",
    ),
]
LEGAL_LAYOUTS = [
    "tp 8",
    "cp 8",
    "pp 4",
    "cp 2 tp 4 --training.seq_len 8",
    "cp 4 tp 2 --parallelism.context_parallel_rotate_method ulysses",
    "cp 3 --parallelism.context_parallel_rotate_method ring --training.seq_len 6",
    "pp 2 cp 2 tp 2 ep 4",
    "pp 2 --parallelism.pipeline_parallel_schedule ZBVZeroBubble --activation_checkpoint.mode none",
    "pp 2 --validation.local_batch_size 3 --validation.enable",
    "pp 2 --parallelism.pipeline_parallel_microbatch_size 2 --validation.local_batch_size 3 "
    "--validation.enable",
    "tp 2 --activation_checkpoint.selective_ac_option op",
    "tp 4 cp 4 pp 4",
]
_AXES = {
    "pp": "pipeline_parallel",
    "cp": "context_parallel",
    "tp": "tensor_parallel",
    "ep": "expert_parallel",
}


def _layout(words: str) -> tuple[str, int]:
    """The command line of a layout, and its ranks."""
    ranks = 1
    arguments = words.split()
    for place in range(len(arguments) - 1):
        if (axis := arguments[place]) in _AXES:
            arguments[place] = f"--parallelism.{_AXES[axis]}_degree"
            ranks *= int(arguments[place + 1]) if axis != "ep" else 1
    return " ".join(arguments), ranks


@pytest.mark.parametrize(("layout", "words"), PARALLEL_RULES)
def test_an_illegal_layout_is_one_line(layout: str, words: str) -> None:
    (line,) = problems(*_layout(layout))
    assert words in line and "\n" not in line


@pytest.mark.parametrize("layout", LEGAL_LAYOUTS)
def test_a_legal_layout_is_silent(layout: str) -> None:
    assert problems(*_layout(layout)) == []


def test_tensor_parallelism_need_not_divide_what_is_not_there() -> None:
    """A model of MoE layers alone has no dense hidden dim, and may have no shared experts."""
    experts = Experts(num_shared_experts=0, hidden_dim=7)
    model = Shape(hidden_dim=7, num_dense_layers=0, moe=experts)
    job = load_job(["--parallelism.tensor_parallel_degree", "8"])
    assert check(job, model, 8, num_gpus=0) == []


def test_expert_biases_want_the_models_dim_to_divide() -> None:
    experts = Experts(projection_bias=True)
    job = load_job(["--parallelism.expert_tensor_parallel_degree", "4"])
    assert check(job, Shape(moe=experts), 4, num_gpus=0) == []
    (line,) = check(job, Shape(moe=experts, dim=66), 4, num_gpus=0)
    assert "must divide dim=66: choose a divisor such as 1, 2" in line


@pytest.mark.parametrize(("arguments", "ranks", "words"), RULES)
def test_a_broken_rule_is_one_line(arguments: str, ranks: int, words: str) -> None:
    (line,) = problems(arguments, ranks)
    assert words in line and "\n" not in line


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        ("", 1),
        ("", 8),
        ("--parallelism.expert_parallel_degree 8", 8),
        (
            "--parallelism.data_parallel_replicate_degree 2 --parallelism.expert_parallel_degree 4",
            8,
        ),
        ("--parallelism.data_parallel_shard_degree 8", 8),
        ("--training.global_batch_size 64", 4),
        ("--training.seq_len 4096 --validation.seq_len 4096", 1),
        ("--training.steps 200", 1),
        ("--activation_checkpoint.mode full --activation_checkpoint.selective_ac_option op", 1),
        ("--checkpoint.enable --checkpoint.create_seed_checkpoint", 1),
        ("--training.dtype float64", 1),
        ("--training.dtype bfloat16", 1),
    ],
)
def test_what_fits_is_silent(arguments: str, ranks: int) -> None:
    assert problems(arguments, ranks) == []


def test_everything_broken_is_said_at_once() -> None:
    lines = problems(
        "--training.enable_cpu_offload --training.seq_len 9999 --validation.seq_len 9999",
        ranks=1,
    )
    assert len(lines) == 3


def test_float8_units_want_bfloat16_and_whole_rows() -> None:
    wide = f"{_FLOAT8} --training.mixed_precision_param float32 --training.seq_len 40"
    first, second = problems(wide + " --training.local_batch_size 1", gpus=1)
    assert first.startswith("training.mixed_precision_param=float32: float8 products of a GPU go")
    assert "1 rows / cp x tp 1 are 40 tokens" in second and "a multiple of 16" in second


def test_float8_experts_want_experts() -> None:
    (line,) = problems(_EMULATED, moe=False)
    assert "grouped_mm.float8: deepseek_v3 debugmodel has no experts; leave it out" in line


def test_float8_without_torchao_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (line,) = problems(_EMULATED)
    assert "needs torchao, which is not installed: pip install 'titan_moe[float8]'" in line


def test_offload_is_fine_with_a_gpu() -> None:
    assert problems("--training.enable_cpu_offload", gpus=1) == []


def test_a_dense_model_has_no_expert_settings() -> None:
    arguments = "--parallelism.expert_parallel_degree 2 --debug.moe_force_load_balance"
    lines = problems(arguments, ranks=2, moe=False)
    assert len(lines) == 2 and all(
        "deepseek_v3 debugmodel has no experts" in line for line in lines
    )
    assert problems("", moe=False) == []


def test_routing_traces(tmp_path: Path) -> None:
    full, record = tmp_path / "full", tmp_path / "record"
    for folder, name in ((full, "notes.txt"), (record, "record.json")):
        folder.mkdir()
        (folder / name).touch()
    (line,) = problems(f"--debug.routing_record {full}")
    assert line == f"debug.routing_record={full} holds other files: choose a new folder"
    (line,) = problems(f"--debug.routing_record {full}/notes.txt")
    assert "notes.txt holds other files" in line
    (line,) = problems(f"--debug.routing_replay {tmp_path}/none")
    assert "routing_replay" in line and "has no record.json: name the folder of a" in line
    (line,) = problems(f"--debug.routing_replay {record} --debug.routing_record {full}/../record")
    assert "is what is replayed: choose another folder" in line
    (line,) = problems(f"--debug.routing_replay {record} --debug.moe_force_load_balance")
    assert "both say where tokens go: choose one" in line
    lines = problems(f"--debug.routing_replay {record} --debug.routing_record new", moe=False)
    assert [line.partition("=")[0] for line in lines] == [
        "debug.routing_record",
        "debug.routing_replay",
    ]
    assert all("deepseek_v3 debugmodel has no experts; leave it out" in line for line in lines)
    assert problems(f"--debug.routing_record {tmp_path}/new --debug.routing_replay {record}") == []
    assert problems(f"--debug.routing_record {record}") == []


def test_a_capture_is_of_a_step_of_the_run() -> None:
    (line,) = problems("--debug.capture_step 9 --training.steps 8")
    assert line.startswith("debug.capture_step=9 is beyond training.steps=8")
    assert problems("--debug.capture_step 8 --training.steps 8") == []


def test_settings_of_experts_say_that_a_dense_model_has_none() -> None:
    arguments = "--moe.row_alignment 16 --moe.bias_update_speed 0.1"
    lines = problems(arguments, moe=False)
    assert lines == [
        f"moe.{setting}: deepseek_v3 debugmodel has no experts; leave it out"
        for setting in ("row_alignment=16", "bias_update_speed=0.1")
    ]
    assert problems(arguments) == []


def test_multi_token_prediction_wants_rows_longer_than_it_looks_ahead() -> None:
    model = Shape(num_mtp_layers=2)
    job = load_job(["--training.seq_len", "2", "--validation.seq_len", "3"])
    (line,) = check(job, model, 1, num_gpus=0)
    assert "training.seq_len=2 must be more than the 2 tokens ahead" in line
    assert "choose at least 3, or fewer layers" in line
    job = load_job(["--training.seq_len", "3", "--training.mtp_loss_weight", "0.1"])
    assert check(job, model, 1, num_gpus=0) == []
    (line,) = check(job, Shape(), 1, num_gpus=0)
    assert "training.mtp_loss_weight=0.1: deepseek_v3 debugmodel has no multi-token" in line


def test_a_tokenizer_must_fit_the_vocabulary() -> None:
    job = load_job(["--model.tokenizer_path", "big"])
    assert check_vocabulary(job, Shape(), 272) == []
    (line,) = check_vocabulary(job, Shape(), 273)
    assert "model.tokenizer_path=big" in line and "273" in line and "vocab_size=272" in line


def test_the_global_batch_is_pinned_for_the_ranks_of_the_run() -> None:
    job = load_job(["--parallelism.data_parallel_replicate_degree", "2"])
    pinned = resolve(job, 8)
    assert pinned.training.global_batch_size == 8 * job.training.local_batch_size
    assert resolve(pinned, 4) == pinned


def test_keys_of_optimizers_that_contradict_each_other():
    (line,) = problems("--optimizer.muon_steps 6")
    assert line.startswith("optimizer.muon_steps=6 is Muon's: leave it out")
    assert problems("--optimizer.muon_steps 6 --optimizer.name Muon") == []
    narrow = "--optimizer.state_dtype bfloat16"
    (line,) = problems(f"{narrow} --optimizer.beta2 0.999")
    assert line.startswith("optimizer.beta2=0.999 changes a moment by less than")
    assert line.endswith("choose 0.99 or less, or float32")
    (line,) = problems(f"{narrow} --optimizer.name Muon --optimizer.muon_momentum 0.995")
    assert line.startswith("optimizer.muon_momentum=0.995")
    assert problems(narrow) == []
