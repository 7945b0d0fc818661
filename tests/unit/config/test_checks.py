"""Rules across tables: every broken one gives its one line."""

import pytest

from tests.support.config_checks import Shape, noted, problems
from titan_moe.config.checks.data import check_vocabulary
from titan_moe.config.checks.job import check
from titan_moe.config.job_config import OPTIMIZER_KEYS
from titan_moe.config.parse import load_job, resolve

_FLOAT8 = '--model.converters ["quantize.linear.float8","quantize.grouped_mm.float8"]'
_EMULATED = (
    '--model.converters ["quantize.grouped_mm.mx"] --quantize.linear.float8.emulate true '
    "--training.mixed_precision_param bfloat16"
)

_ROLL_BACK = "--training.on_nonfinite roll_back --checkpoint.enable"

RULES = [
    (
        "--training.text_column body",
        1,
        "training.text_column='body' has no use with training.dataset='stdlib': leave it out, or "
        "choose json, parquet or a Hugging Face dataset",
    ),
    (
        '--training.blend [{"dataset":"json"},{"dataset":"tokens","text_column":"body"}]',
        1,
        "training.blend[1].text_column='body' has no use with training.blend[1].dataset='tokens': "
        "leave it out, or choose json, parquet or a Hugging Face dataset",
    ),
    (
        "--validation.dataset text --validation.text_column body",
        1,
        "validation.text_column='body' has no use with validation.dataset='text': leave it out, or "
        "choose json, parquet or a Hugging Face dataset",
    ),
    (
        "--parallelism.expert_parallel_degree 3",
        3,
        "parallelism.expert_parallel_degree=3 must divide num_experts=8: choose 1, 2, 4 or 8",
    ),
    (
        "--parallelism.data_parallel_shard_degree 8",
        2,
        "parallelism: dp_shard 8 = 8 ranks, but this run has 2: start it with NGPU=8 (--ranks "
        "8), or set parallelism.data_parallel_shard_degree=-1 to take what is there",
    ),
    (
        "--parallelism.data_parallel_replicate_degree 4",
        6,
        "parallelism: dp_replicate 4 = 4 must divide the 6 ranks of this run: start it with a "
        "multiple, such as NGPU=4 (--ranks 4)",
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
        f"{_FLOAT8} --training.mixed_precision_param bfloat16",
        1,
        "model.converters: a CPU has no float8 units: set quantize.linear.float8.emulate=true to "
        "see the rounding, or leave it out",
    ),
    (
        f"{_EMULATED} --parallelism.expert_tensor_parallel_degree 32",
        32,
        "model.converters=quantize.grouped_mm.mx wants multiples of 32, and the experts' "
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
    (
        "--training.max_seconds 60",
        1,
        "max_seconds=60 stops a run with its state saved: set",
    ),
    (
        "--training.on_nonfinite roll_back",
        1,
        "training.on_nonfinite=roll_back goes back to the run's last checkpoint: set "
        "checkpoint.enable=true and checkpoint.load_only=false",
    ),
    (
        "--training.on_spike roll_back --training.spike_factor 5 --training.on_nonfinite roll_back "
        "--checkpoint.enable --checkpoint.load_only",
        1,
        "training.on_nonfinite=roll_back and training.on_spike=roll_back goes back to the run's",
    ),
    (
        f'{_ROLL_BACK} --checkpoint.exclude_from_loading ["optimizer","dataloader"]',
        1,
        "checkpoint.exclude_from_loading leaves out optimizer, dataloader: choose stop or skip",
    ),
    (
        f'{_ROLL_BACK} --training.steps 20 --stages [{{"from_step":9,"seq_len":1024}}]',
        1,
        "training.on_nonfinite=roll_back may go back to another stage",
    ),
    (
        f"{_ROLL_BACK} --debug.routing_record /no/such/folder",
        1,
        "debug.routing_record=/no/such/folder has the data of every step, and training.on_non",
    ),
]


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
        "--checkpoint.load_step 4 --training.seq_len 9999 --validation.seq_len 9999",
        ranks=1,
    )
    assert len(lines) == 3


def test_what_only_gpus_have_is_a_note_on_a_cpu() -> None:
    arguments = "--training.enable_cpu_offload --profiling.enable_memory_snapshot"
    lines = noted(arguments)
    assert len(lines) == 2 and all("has no effect on a CPU" in line for line in lines)
    assert noted(arguments, gpus=1) == []


def test_a_policy_for_spikes_that_nothing_tells_is_a_note() -> None:
    (line,) = noted("--training.on_spike skip")
    assert line.startswith("training.on_spike=skip has no effect without training.spike_factor")


def test_multi_token_prediction_wants_rows_longer_than_it_looks_ahead() -> None:
    model = Shape(num_mtp_layers=2)
    job = load_job(["--training.seq_len", "2", "--validation.seq_len", "3"])
    (line,) = check(job, model, 1, num_gpus=0)
    assert "training.seq_len=2 must be more than the 2 tokens ahead" in line
    assert "choose at least 3, or fewer layers" in line
    job = load_job(["--training.seq_len", "3", "--training.mtp_loss_weight", "0.1"])
    assert check(job, model, 1, num_gpus=0) == []
    (line,) = noted("--training.mtp_loss_weight 0.1")
    assert line.startswith("training.mtp_loss_weight=0.1 has no effect: deepseek_v3 debugmodel")


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
    (line,) = noted("--optimizer.muon_steps 6")
    assert line == ("optimizer.muon_steps=6 has no effect with optimizer.name=AdamW, but with Muon")
    assert noted("--optimizer.muon_steps 6 --optimizer.name Muon") == []
    assert noted("--optimizer.muon_steps 5") == []
    narrow = "--optimizer.state_dtype bfloat16"
    (line,) = problems(f"{narrow} --optimizer.beta2 0.999")
    assert line.startswith("optimizer.beta2=0.999 changes a moment by less than")
    assert line.endswith("choose 0.99 or less, or float32")
    (line,) = problems(f"{narrow} --optimizer.name Muon --optimizer.muon_momentum 0.995")
    assert line.startswith("optimizer.muon_momentum=0.995")
    assert problems(narrow) == []


def test_a_key_that_the_optimizer_does_not_read_is_a_note(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(OPTIMIZER_KEYS, "Adam", ("beta1", "implementation"))
    said = noted(
        "--optimizer.name Adam --optimizer.beta1 0.8 --optimizer.beta2 0.98 --optimizer.eps 1e-8 "
        "--optimizer.state_dtype bfloat16 --optimizer.weight_decay 0.2"
    )
    assert [line.partition(",")[0] for line in said] == [
        "optimizer.beta2=0.98 has no effect with optimizer.name=Adam",
        "optimizer.state_dtype=bfloat16 has no effect with optimizer.name=Adam",
    ]
    assert said[0].endswith("but with AdamW or Muon")


_BLEND = '--training.blend [{"dataset":"stdlib"}]'


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ("--validation.dataset_path held.jsonl", "validation.dataset_path='held.jsonl'"),
        ("--validation.text_column body", "validation.text_column='body'"),
        (_BLEND + " --training.dataset synthetic", "training.dataset='synthetic'"),
        (_BLEND + " --training.dataset_path a", "training.dataset_path='a'"),
    ],
)
def test_a_key_of_data_that_is_not_read_is_refused(overrides: str, key: str) -> None:
    (line,) = problems(overrides)
    assert line.startswith(f"{key} is not read ")
