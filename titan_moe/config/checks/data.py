"""Lengths and batches of the data, and its vocabulary."""

from titan_moe.config.checks.run import Check, ModelShape, Note, Run, flavor
from titan_moe.config.job_config import DATASETS_WITHOUT_PATH, JobConfig

_WITHOUT_COLUMNS = (*DATASETS_WITHOUT_PATH, "text", "tokens")


def check_vocabulary(job: JobConfig, model: ModelShape, tokenizer_size: int) -> list[str]:
    """`tokenizer_size` is the largest token id plus one, special tokens included."""
    if tokenizer_size <= model.vocab_size:
        return []
    return [
        f"model.tokenizer_path={job.model.tokenizer_path}: its {tokenizer_size} tokens do not fit "
        f"vocab_size={model.vocab_size} of {flavor(job)}: choose a smaller tokenizer or another "
        f"flavor"
    ]


def _sequence_length(run: Run) -> list[str]:
    limit = run.model.max_seq_len
    lengths = {
        "training.seq_len": run.job.training.seq_len,
        "validation.seq_len": run.job.validation.seq_len or 0,
    }
    return [
        f"{key}={length} exceeds max_seq_len={limit} of {run.flavor}: choose at most {limit}"
        for key, length in lengths.items()
        if length > limit
    ]


def _unread_data(run: Run) -> list[str]:
    """Keys that name data beside others that say what is read."""
    training, validation = run.job.training, run.job.validation
    plain = type(training)()
    lines = []
    if validation.dataset is None:
        lines += [
            f"validation.{key}={value!r} is not read without validation.dataset: set that too, to "
            "json or what else the data is, or leave it out"
            for key in ("dataset_path", "text_column")
            if (value := getattr(validation, key)) is not None
        ]
    if training.blend:
        lines += [
            f"training.{key}={value!r} is not read beside training.blend: leave out one of them"
            for key in ("dataset", "dataset_path")
            if (value := getattr(training, key)) != getattr(plain, key)
        ]
    return lines


def _text_columns(run: Run) -> list[str]:
    """A column that nothing is read from."""
    training, validation = run.job.training, run.job.validation
    plain = type(training)().text_column
    given: list[tuple[str, str | None, str | None]] = [
        ("validation.", validation.dataset, validation.text_column)
    ]
    if training.blend:
        given += [
            (f"training.blend[{number}].", part.dataset, part.text_column)
            for number, part in enumerate(training.blend)
        ]
    elif training.text_column != plain:
        given.append(("training.", training.dataset, training.text_column))
    return [
        f"{key}text_column={column!r} has no use with {key}dataset={dataset!r}: leave it out, or "
        "choose json, parquet or a Hugging Face dataset"
        for key, dataset, column in given
        if column is not None and dataset in _WITHOUT_COLUMNS
    ]


def _further_tokens(run: Run) -> list[str]:
    depths, weight = run.model.num_mtp_layers, run.job.training.mtp_loss_weight
    if not depths:
        return [
            Note(
                f"training.mtp_loss_weight={weight} has no effect: {run.flavor} has no multi-token "
                f"prediction without model.num_mtp_layers"
            )
        ] * (weight is not None)
    lengths = {
        "training.seq_len": run.job.training.seq_len,
        "validation.seq_len": run.job.validation.seq_len,
    }
    return [
        f"{key}={length} must be more than the {depths} tokens ahead of model.num_mtp_layers: "
        f"choose at least {depths + 1}, or fewer layers"
        for key, length in lengths.items()
        if length is not None and length <= depths
    ]


def _global_batch(run: Run) -> list[str]:
    size, local = run.job.training.global_batch_size, run.job.training.local_batch_size
    if run.data_ranks is None or size < 1:
        return []
    step = local * run.data_ranks
    if size % step == 0:
        return []
    return [
        f"training.global_batch_size={size} must be a multiple of local_batch_size {local} x "
        f"{run.data_ranks} data ranks = {step}: choose {max(size // step, 1) * step}"
    ]


CHECKS: list[Check] = [
    _sequence_length,
    _unread_data,
    _text_columns,
    _further_tokens,
    _global_batch,
]
