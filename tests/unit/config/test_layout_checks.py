"""Layouts that cannot run are refused in one line; those that can are not."""

import pytest

from tests.support.config_checks import Experts, Shape, noted, problems
from titan_moe.config.checks.job import check
from titan_moe.config.parse import load_job

_ASYNC = "--parallelism.enable_async_tensor_parallel true"

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
    f"tp 2 ep 2 {_ASYNC} --activation_checkpoint.mode full",
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


_PP = "--parallelism.pipeline_parallel_degree"
_PARTS = '[["tok_embeddings","layers.0","layers.1"],["layers.2","layers.3","norm","output"]]'


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (_ASYNC, "enable_async_tensor_parallel=true"),
        (f"{_PP} 2 --parallelism.fsdp_accumulation reduce_each", "fsdp_accumulation=reduce_each"),
        (
            f"{_PP} 2 --parallelism.module_fqns_per_model_part={_PARTS} "
            "--parallelism.pipeline_parallel_layers_per_stage 2",
            "pipeline_parallel_layers_per_stage=2",
        ),
    ],
)
def test_a_key_without_effect_in_the_layout_is_a_note(arguments: str, key: str) -> None:
    (line,) = noted(arguments, ranks=2)
    assert line.startswith(f"parallelism.{key} has no effect ")
