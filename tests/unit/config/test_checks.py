"""Rules across tables: every broken one gives its one line."""

from dataclasses import dataclass

import pytest

from titan_moe.config.checks import check, check_vocabulary
from titan_moe.config.load import load_job
from titan_moe.config.resolve import resolve


@dataclass(frozen=True)
class _Experts:
    num_experts: int = 8
    top_k: int = 2
    hidden_dim: int = 256


@dataclass(frozen=True)
class _Shape:
    vocab_size: int = 259
    max_seq_len: int = 4096
    num_layers: int = 4
    dim: int = 64
    moe: _Experts | None = _Experts()


def _check(arguments: str, ranks: int = 1, gpus: int = 0, moe: bool = True) -> list[str]:
    model = _Shape(moe=_Experts() if moe else None)
    return check(load_job(arguments.split()), model, ranks, num_gpus=gpus)


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
        "--parallelism.tensor_parallel_degree 2",
        2,
        "parallelism.tensor_parallel_degree=2 is not available yet: this version trains with "
        "FSDP2, HSDP, expert and expert tensor parallelism; choose 1",
    ),
    ("--parallelism.context_parallel_degree 2", 2, "context_parallel_degree=2 is not available"),
    ("--parallelism.pipeline_parallel_degree 2", 2, "pipeline_parallel_degree=2 is not available"),
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
    ("--compile.enable", 1, "compile.enable=true is not available yet: choose false"),
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
        "--activation_checkpoint.selective_ac_option op",
        1,
        "activation_checkpoint.selective_ac_option='op' must be a positive integer N",
    ),
    (
        "--activation_checkpoint.selective_ac_option 0",
        1,
        "activation_checkpoint.selective_ac_option='0' must be a positive integer N",
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


@pytest.mark.parametrize(("arguments", "ranks", "words"), RULES)
def test_a_broken_rule_is_one_line(arguments: str, ranks: int, words: str) -> None:
    (line,) = _check(arguments, ranks)
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
    assert _check(arguments, ranks) == []


def test_everything_broken_is_said_at_once() -> None:
    lines = _check("--compile.enable --training.seq_len 9999 --validation.seq_len 9999", ranks=1)
    assert len(lines) == 3


def test_offload_is_fine_with_a_gpu() -> None:
    assert _check("--training.enable_cpu_offload", gpus=1) == []


def test_a_dense_model_has_no_expert_settings() -> None:
    arguments = "--parallelism.expert_parallel_degree 2 --debug.moe_force_load_balance"
    lines = _check(arguments, ranks=2, moe=False)
    assert len(lines) == 2 and all(
        "deepseek_v3 debugmodel has no experts" in line for line in lines
    )
    assert _check("", moe=False) == []


def test_a_tokenizer_must_fit_the_vocabulary() -> None:
    job = load_job(["--model.tokenizer_path", "big"])
    assert check_vocabulary(job, _Shape(), 259) == []
    (line,) = check_vocabulary(job, _Shape(), 260)
    assert "model.tokenizer_path=big" in line and "260" in line and "vocab_size=259" in line


def test_the_global_batch_is_pinned_for_the_ranks_of_the_run() -> None:
    job = load_job(["--parallelism.data_parallel_replicate_degree", "2"])
    pinned = resolve(job, 8)
    assert pinned.training.global_batch_size == 8 * job.training.local_batch_size
    assert resolve(pinned, 4) == pinned
