"""The rehearsed cases: families in layouts of 2 to 8 ranks, options, and the shipped GPU files."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from titan_moe.checks.job import check
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import load_job, resolve
from titan_moe.config.pipeline import SCHEDULES
from titan_moe.models.config import GQAConfig, ModelConfig
from titan_moe.models.hf import model_of_job
from titan_moe.models.registry import FAMILIES
from titan_moe.parallelize.communicators import NODE
from titan_moe.parallelize.memory import GIB
from titan_moe.parallelize.policies import make_plan
from titan_moe.verify.layouts.covering import cover_options, cover_pairs
from titan_moe.verify.layouts.layouts import apply_layout, depth, legal_layouts, parse

CONFIGS = Path(__file__).parents[2] / "configs"
_SAMPLES, _SEED = {(2, 4, 8): 30, (2, 4): 12}, 22
"""Sizes of worlds, and how many layouts of them; the first is the gate's sample."""
_GPU_BYTES = 79 * GIB
"""Memory of an H100, as `titan-moe memory` counts it."""
_STAGES = 4
LAYERS = 4
"""Number of layers that a shipped model keeps: all kinds that its family has."""

# Alignments that float8 and grouped GEMMs in bf16 ask for; the gate's flavors are float64's.
_FLAVORS = {"qwen3": "debugmodel_moe.toml"}
_OPTIONS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "cpu offload": {
        "training": {"enable_cpu_offload": True},
        "parallelism": {"fsdp_accumulation": "auto"},
    },
    "Muon": {"optimizer": {"name": "Muon"}},
    "recompute full": {"activation_checkpoint": {"mode": "full", "keep_attention": True}},
    "bounded": {"parallelism": {"expert_parallel_capacity_factor": 1.5}},
    "symmetric": {"parallelism": {"expert_parallel_comm_backend": "symmetric"}},
    "no documents": {"training": {"mask_documents": False}},
    "float8": {
        "model": {"converters": ["quantize.linear.float8", "quantize.grouped_mm.float8"]},
    },
}
_OPTIONS_LAYOUT = "dp_shard=4,tp=2,ep=4"


@dataclass(frozen=True)
class Case:
    """A job on one rank of a world."""

    name: str
    job: JobConfig
    config: ModelConfig
    world_size: int
    rank: int
    path: Path
    """The file that the job is from."""

    def refusals(self) -> list[str]:
        """Returns the lines of the configuration's checks."""
        return check(self.job, self.config, self.world_size)

    def resolved(self) -> JobConfig:
        """Returns the resolved job. Raises ConfigError with the lines of `refusals`."""
        if lines := self.refusals():
            raise ConfigError([f"{self.name}: {line}" for line in lines])
        return resolve(self.job, self.world_size)


def all_cases() -> Iterator[Case]:
    yield from layout_cases()
    yield from option_cases()
    yield from shipped_cases()


def layout_cases() -> Iterator[Case]:
    """Yields the layouts of the gate's sample, of a sample of small ones, and each schedule on four
    ranks; families take turns."""
    sample = []
    for worlds, size in _SAMPLES.items():
        layouts = [layout for world in worlds for layout in legal_layouts(world)]
        sample += cover_options(cover_pairs(layouts, size, _SEED))
    sample += [parse(f"pp={_STAGES},schedule={schedule}") for schedule in SCHEDULES]
    for number, layout in enumerate(dict.fromkeys(sample)):
        # The first family in turn that this layout suits.
        turns = [list(FAMILIES)[(number + turn) % len(FAMILIES)] for turn in range(len(FAMILIES))]
        cases = (list(in_layout(family, str(layout))) for family in turns)
        yield from next(each for each in cases if not each[0].refusals())


def option_cases() -> Iterator[Case]:
    """Yields each family in one layout without options, and Qwen3 there with each option."""
    for family in FAMILIES:
        yield from in_layout(family, _OPTIONS_LAYOUT)
    for name, tables in _OPTIONS.items():
        for case in in_layout("qwen3", _OPTIONS_LAYOUT):
            job = case.job.with_values(**tables)
            yield replace(case, name=f"{case.name} {name}", job=job)
    # The gate's heads, and its type. Dense: a grouped GEMM in float64 is a loop, which waits.
    for head_dim, dtype in ((8, "float32"), (32, "float64")):
        for case in in_layout("qwen3", "tp=2,cp=2"):
            job = case.job.with_values(training={"dtype": dtype})
            config = replace(with_heads(case.config, head_dim), moe=None)
            name = f"{case.name} heads {head_dim} {dtype}"
            yield replace(case, name=name, job=job, config=config)


def with_heads(config: ModelConfig, head_dim: int) -> ModelConfig:
    assert isinstance(config.attention, GQAConfig)
    return replace(config, attention=replace(config.attention, head_dim=head_dim))


def in_layout(family: str, text: str) -> Iterator[Case]:
    """Yields a family's small model on a layout's last rank; with a pipeline also on the first rank
    and on one of a stage in the middle."""
    path = CONFIGS / family / _FLAVORS.get(family, "debugmodel.toml")
    layout = parse(text)
    job = apply_layout(load_job(["--job.config_file", str(path)]), layout)
    config = replace(model_of_job(job.model), num_layers=depth(layout))
    last = layout.world_size - 1
    middle = layout.world_size // layout.pp * (layout.pp // 2) if layout.pp > 2 else last
    for rank in sorted({0, middle, last}) if layout.pp > 1 else (last,):
        name = f"{family} {layout} rank {rank}"
        yield Case(name, job, config, layout.world_size, rank, path)


def shipped_cases(layers: int = LAYERS) -> Iterator[Case]:
    """Yields the GPU configurations on the last rank of their world, cut to their first layers."""
    for path in sorted(CONFIGS.glob("*/*_*gpu.toml")):
        world_size = int(path.stem.rpartition("_")[2].removesuffix("gpu"))
        if world_size not in (8, 64):
            continue
        job = load_job(["--job.config_file", str(path)])
        config, name = model_of_job(job.model), f"{path.parent.name}/{path.name}"
        if job.parallelism.pipeline_parallel_degree == 1:
            # "auto" is resolved for the whole model, not for its first layers.
            on_gpus = partial(make_plan, device_type="cuda", device_bytes=_GPU_BYTES)
            whole = on_gpus(job, config, world_size, ranks_per_node=NODE)
            job = job.with_values(parallelism={"fsdp_accumulation": whole.accumulation})
            config = replace(config, num_layers=min(layers, config.num_layers))
            name += f" of {config.num_layers} layers"
        yield Case(name, job, config, world_size, world_size - 1, path)
