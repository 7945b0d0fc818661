"""A job from its file to a checked and resolved configuration, without torch where that can be."""

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec

from titan_moe.checks.data import check_vocabulary
from titan_moe.checks.job import check
from titan_moe.checks.notes import fit_to_cpu, narrow_lines, notes, without_experts
from titan_moe.checks.run_folder import check_run_folder, position_rule
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig, Parallelism
from titan_moe.config.parse import read_job, resolve
from titan_moe.models.config import ModelConfig
from titan_moe.models.hf import HFModel, as_record, export_problems, model_of_job
from titan_moe.prepare.load_checks import check_adapters, check_loading
from titan_moe.runtime.launch import count_gpus, has_bfloat16_units


def prepare(
    argv: list[str], world_size: int, environment: Mapping[str, str]
) -> tuple[JobConfig, ModelConfig, list[str]]:
    """Returns the checked and resolved configuration, the model's dimensions, and one note for each
    key that has no effect. On a machine without GPUs, switches off what only they have. Raises
    ConfigError."""
    given, lines = read_job(argv)
    if not count_gpus(environment):
        given, more = fit_to_cpu(given, bfloat16_units=has_bfloat16_units())
        lines += more
    log_ranks(environment, world_size)
    job = given
    if job.checkpoint.create_seed_checkpoint:
        # Initial weights are the same in every layout: any number of ranks can write them.
        job = job.model_copy(update={"parallelism": Parallelism(), "stages": []})
    model = model_of_job(job.model)
    if model.moe is None:
        job = without_experts(job)
    problems = check(job, model, world_size, [position_rule(job)])
    if job.model.converters and find_spec("torchao") is None:
        named = ",".join(job.model.converters)
        problems.append(f"model.converters={named} needs the package torchao: pip install torchao")
    if job.checkpoint.enable and job.checkpoint.last_save_in_hf:
        exported = model
        if model.moe is not None:
            chosen = job.moe.model_dump(include={"score", "bias_update"}, exclude_none=True)
            exported = replace(model, moe=replace(model.moe, **chosen))
        # Adapters alone are exported, and the routing's bias is frozen beside them.
        speed = job.moe.bias_update_speed if job.lora.rank is None else 0.0
        problems += export_problems(HFModel(job.model.name, exported), speed)
    if problems:
        raise ConfigError(problems)
    job = resolve(job, world_size)
    lines += notes(given, model, world_size) + narrow_lines(job)
    if job.training.freeze or job.optimizer.groups:
        from titan_moe.models.trained import pattern_lines  # With torch, which takes a while.

        lines += pattern_lines(model, job.training, job.lora, job.optimizer.groups)
    return job, model, lines


def check_all(
    argv: list[str], world_size: int, num_nodes: int, environment: Mapping[str, str]
) -> tuple[JobConfig, list[str]]:
    """Check configuration, tokenizer, data and checkpoint in one plain process, before any rank
    starts.

    Returns the resolved configuration, and the notes of `prepare` and those about the data. Raises
    ConfigError with all mistakes.
    """
    # Imported here: ranks would wait for numpy's import.
    from titan_moe.data.check import check_data, data_notes
    from titan_moe.data.tokenizer import load_tokenizer
    from titan_moe.metrics.sinks import missing_packages

    if world_size % num_nodes:
        raise ConfigError(f"--ranks {world_size} must be a multiple of --nodes {num_nodes}")
    job, model, lines = prepare(argv, world_size, environment)
    problems = check_run_folder(job, as_record(model)) + missing_packages(job.metrics)
    if problems := problems + check_data(job.training, job.validation, job.model.tokenizer_path):
        raise ConfigError(problems)
    tokenizer = load_tokenizer(job.model.tokenizer_path, job.training)
    problems = check_vocabulary(job, model, tokenizer.vocab_size) or check_loading(job, model)
    if problems := problems or check_adapters(job, model):
        raise ConfigError(problems)
    return job, lines + data_notes(job.training, job.validation)


def log_ranks(environment: Mapping[str, str], world_size: int) -> set[int]:
    """Returns the ranks that print, from LOG_RANK. Raises ConfigError."""
    text = environment.get("LOG_RANK", "0")
    try:
        ranks = {int(rank) for rank in text.split(",")}
    except ValueError:
        raise ConfigError(f"LOG_RANK={text} must be rank numbers, such as 0 or 0,1") from None
    if not ranks & set(range(world_size)):
        line = f"LOG_RANK={text}: none of the ranks 0 to {world_size - 1} would print: choose 0"
        raise ConfigError(line)
    return ranks
