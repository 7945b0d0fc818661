"""Control runs: variations of a training that change the order of its sums and nothing else."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice

from titan_moe.checks.job import check
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import load_job
from titan_moe.models.hf import model_of_job
from titan_moe.verify.compare.run_spec import RunSpec, Words, words_of
from titan_moe.verify.layouts.layouts import Layout, parse


def control_specs(
    spec: RunSpec, number: int, *, layouts: Sequence[str] = (), num_gpus: int
) -> list[tuple[RunSpec, Words]]:
    """Returns `number` variations of a training, each with the keys that make it.

    Each has its sequences in another order; every second one has another layout too, of those
    given or of the neighbours of its own, as far as its configuration allows them. The gradient
    gate proves layouts equal in float64, so what they differ by is rounding.

    Args:
        num_gpus: GPUs of this machine; without any, a single rank's neighbours have two.
    """
    job = spec.job()
    own = layout_of(job, spec.world_size)
    others = [parse(text) for text in layouts] or _neighbours(own, on_cpu=num_gpus == 0)
    specs = [spec.with_layout(layout) for layout in others]
    specs = [other for other in specs if _is_legal(other, job)]
    variations = [each for other in specs for each in (spec, other)] or [spec]
    return [
        (each, (*batch_words(each, job), ("debug.permute_rows", str(seed))))
        for seed, each in enumerate(islice(cycle(variations), number), 1)
    ]


def batch_words(spec: RunSpec, job: JobConfig) -> Words:
    """The global batch of `job`, and microbatches of it that fit the spec's ranks."""
    total = job.training.global_batch_size
    layout = spec.layout or layout_of(job, spec.world_size)
    own = max(1, total // layout.data_ranks)
    # A pipeline takes all its sequences in one run of its schedule.
    local = own if spec.layout and layout.pp > 1 else min(own, job.training.local_batch_size)
    return words_of("training", global_batch_size=total, local_batch_size=local)


def layout_of(job: JobConfig, world_size: int) -> Layout:
    """Returns the layout that a configuration names."""
    section = job.parallelism
    shard = section.shard_degree(world_size)
    assert shard is not None, "a spec's job fits its ranks"
    degrees = section.degrees | {"dp_shard": shard}
    return Layout(**degrees, schedule=section.pipeline_parallel_schedule)  # type: ignore[arg-type]


def _neighbours(own: Layout, *, on_cpu: bool) -> list[Layout]:
    """Layouts of as many ranks, with one axis twice as large, or experts cut otherwise."""
    if on_cpu and own.world_size == 1:
        return [Layout(dp_shard=2), Layout(tp=2), Layout(dp_shard=2, ep=2), Layout(cp=2)]
    found = [replace(own, ep=own.ep * 2), replace(own, ep=max(1, own.ep // 2))]
    if own.dp_shard % 2 == 0:
        half = replace(own, dp_shard=own.dp_shard // 2)
        found += [replace(half, tp=own.tp * 2), replace(half, cp=own.cp * 2)]
    inner = own.dp_shard * own.cp * own.tp
    return [each for each in found if each != own and inner % (each.ep * each.etp) == 0]


def _is_legal(spec: RunSpec, job: JobConfig) -> bool:
    try:
        laid_out = load_job([*spec.file(), *spec.arguments(*batch_words(spec, job))])
    except ConfigError:
        return False
    return not check(laid_out, model_of_job(laid_out.model), spec.world_size)
