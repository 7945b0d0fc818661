"""Lengths and batches of the data, its vocabulary, and keys that name data which nothing reads."""

from collections.abc import Iterator

from titan_moe.checks.base import Rule, Run, flavor
from titan_moe.config.errors import Mistake
from titan_moe.config.job_config import JobConfig
from titan_moe.models.config import ModelConfig


def check_vocabulary(job: JobConfig, model: ModelConfig, tokenizer_size: int) -> list[str]:
    """Returns a line if token ids do not fit the model.

    Args:
        tokenizer_size: the largest token id plus one, special tokens included.
    """
    if tokenizer_size <= model.vocab_size:
        return []
    return [
        f"model.tokenizer_path={job.model.tokenizer_path}: its {tokenizer_size} tokens do not fit "
        f"vocab_size={model.vocab_size} of {flavor(job)}: choose a smaller tokenizer or another "
        f"flavor"
    ]


def _sequence_length(run: Run) -> Iterator[str]:
    most, depths = run.model.max_seq_len, run.model.num_mtp_layers
    for key, length in run.sequence_lengths.items():
        if length > most:
            yield (
                f"{key}={length} exceeds max_seq_len={most} of {run.flavor}: choose at most {most}"
            )
        if length <= depths:
            yield (
                f"{key}={length} must be more than the {depths} tokens ahead of "
                f"model.num_mtp_layers: choose at least {depths + 1}, or fewer layers"
            )


def _unread_data(run: Run) -> Iterator[str]:
    training, validation = run.job.training, run.job.validation
    without_name = validation.dataset is None and validation.dataset_path is not None
    if validation.enable and without_name:
        yield (
            f"validation.dataset_path={validation.dataset_path!r} is not read without "
            "validation.dataset: set that too, such as to json, or leave it out"
        )
    for key in ("dataset", "dataset_path"):
        value = getattr(training, key)
        if training.blend and value != type(training).model_fields[key].default:
            yield (
                f"training.{key}={value!r} is not read beside training.blend: leave out one of them"
            )


def _global_batch(run: Run) -> Iterator[Mistake]:
    size, local = run.job.training.global_batch_size, run.job.training.local_batch_size
    data_ranks = run.job.parallelism.data_ranks(run.world_size)
    if data_ranks is None or size == -1:
        return
    step = local * data_ranks
    if size % step:
        near = max(size // step, 1) * step
        yield Mistake(
            f"training.global_batch_size={size} must be a multiple of local_batch_size {local} x "
            f"{data_ranks} data ranks = {step}",
            # The data's order is a function of the global batch alone.
            [
                [{"training.local_batch_size": n} for n in range(local - 1, 0, -1)],
                [{"training.global_batch_size": near}],
            ],
            "choose other sizes, or another number of ranks",
        )


def _conversations(run: Run) -> Iterator[str]:
    training = run.job.training
    if training.dataset_format == "messages" and not training.mask_documents:
        yield (
            "training.mask_documents=false lets conversations attend to each other: leave it out, "
            "or set training.dataset_format to text"
        )
    if training.epochs is None:
        return
    key = f"training.epochs={training.epochs}"
    if training.dataset_format == "text":
        yield f"{key} counts passes over conversations: set training.steps for texts"
    if len(training.blend) > 1:
        yield f"{key}: the sources of training.blend end at different steps: set training.steps"
    if run.job.stages:
        yield f"{key} ends at a step that [[stages]] do not know: set training.steps"


RULES: list[Rule] = [_sequence_length, _unread_data, _global_batch, _conversations]
