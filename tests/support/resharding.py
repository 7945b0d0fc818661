"""Runs that stop in one layout and go on in another, watched from outside.

Whole tensors are put together from the ranks' parts by arithmetic alone
(titan_moe.verify.layouts.shards): neither DTensor's placements nor DCP's metadata nor the
checkpoint's checksums have a say in it.
"""

import json
import shutil
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader

from tests.support.paths import DEBUG_CONFIGS
from tests.support.trainings import process_here
from titan_moe.checks.job import check
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import load_job
from titan_moe.distributed.dtensor import local_part
from titan_moe.metrics.jsonl import read_json_lines
from titan_moe.models.config import ModelConfig
from titan_moe.models.registry import model_config
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.training.trainer import Trainer
from titan_moe.verify.layouts.layouts import Layout, apply_layout
from titan_moe.verify.layouts.shards import Box, Shards

ROWS = 24
"""Rows of a global batch: each of 1, 2, 3, 4, 6 and 8 data ranks gets some."""
LEG = 2
"""Steps before and after the change of layout, and from one checkpoint to the next."""
_CURVE = ("loss", "grad_norm", "balance_loss")


class Part(NamedTuple):
    """One rank's part of a tensor."""

    box: Box
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    values: np.ndarray


@dataclass
class Watched:
    """One rank's parts of all tensors in a run."""

    saved: dict[int, dict[str, Part]] = field(default_factory=dict)
    """All parts that it held when a step was saved, by step."""
    loaded: dict[str, Part] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    """Modules and parameters that a change of layout left in memory."""


@dataclass
class Run:
    """One run or one leg of it, over all its ranks."""

    folder: Path
    ranks: list[Watched]

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoint" / f"step-{step}"

    def read(self, step: int, name: str) -> dict[str, Any]:
        return json.loads((self.checkpoint(step) / name).read_text())

    def logged(self, step: int, *keys: str) -> tuple[float, ...]:
        """Returns these keys of a step's metrics."""
        lines = read_json_lines(self.folder / "metrics.jsonl")
        return next(tuple(line[key] for key in keys) for line in lines if line["step"] == step)


def make_job(
    family: str,
    layout: Layout,
    folder: Path,
    *,
    steps: int,
    optimizer: dict[str, Any] | None = None,
) -> JobConfig:
    """The family's gate configuration in a layout, in float64, with a checkpoint every LEG."""
    job = load_job(["--job.config_file", str(DEBUG_CONFIGS / f"gate_{family}.toml")])
    own = ROWS // layout.data_ranks
    local, microbatch = (own // 2, 1) if own % 2 == 0 else (own, 1)
    if layout.pp > 1:
        runs = 2 if own >= 4 * layout.num_stages else 1
        local = own // runs
        microbatch = max(1, local // layout.num_stages)
    tables = {
        "parallelism": {
            # Production's own split: the depth need not be the one that layouts.stages is made for.
            "module_fqns_per_model_part": None,
            "pipeline_parallel_microbatch_size": microbatch,
        },
        "training": {
            "local_batch_size": local,
            "global_batch_size": ROWS,
            "steps": steps,
            # Text would cost each rank the import of `datasets`, half of what it computes here.
            "dataset": "synthetic",
            "dataset_path": None,
        },
        "job": {"dump_folder": str(folder)},
        "lr_scheduler": {"total_steps": 2 * LEG},
        "checkpoint": {"enable": True, "interval": LEG},
        "optimizer": optimizer or {},
    }
    if layout.dispatch == "bounded":
        # The gate's own factor drops rows of synthetic tokens in two families; this never does.
        tables["parallelism"]["expert_parallel_capacity_factor"] = float(layout.ep)
    return apply_layout(job, layout, tables)


def run(
    family: str,
    layout: Layout,
    folder: Path,
    *,
    steps: int,
    depth: int,
    after: Layout | None = None,
    plant: Callable[[], None] | None = None,
) -> Run:
    """Train to `steps` on a model of `depth` layers; goes on from the folder's last checkpoint.

    Args:
        after: the layout of the steps after LEG, for which the run does not stop.
        plant: runs on every rank before anything else.
    """
    job = make_job(family, layout, folder, steps=steps)
    config = replace(model_config(family, "gate"), num_layers=depth)
    problems = check(job, config, layout.world_size)
    assert not problems, f"{layout}: {problems}"
    other = (make_job(family, after, folder, steps=steps), after) if after else None
    ranks = run_on_ranks(train_watched, layout.world_size, job, config, layout, other, plant)
    return Run(folder, ranks)


def go_on(family: str, source: Run, layout: Layout, folder: Path, **how: Any) -> Run:
    """Train LEG steps more from a checkpoint of another run, in a folder of its own."""
    shutil.copytree(source.checkpoint(LEG), folder / "checkpoint" / f"step-{LEG}")
    return run(family, layout, folder, steps=2 * LEG, **how)


def train_watched(
    job: JobConfig,
    config: ModelConfig,
    layout: Layout,
    after: tuple[JobConfig, Layout] | None,
    plant: Callable[[], None] | None,
) -> Watched:
    """Trains on a rank as titan_moe.train does; saves again at once what was loaded."""
    if plant is not None:
        plant()
    trainer, watched = Trainer(job, config, process_here()), Watched()
    make_step = trainer._step
    if after is None:
        _watch_saves(trainer, watched, layout)
    if trainer.progress.step > 0:
        trainer.checkpointer.save(trainer.progress.step, trainer._state())
        watched.loaded = watched.saved[trainer.progress.step]

    def reshard_and_step(step: int) -> bool:
        if after is not None and step == LEG + 1:
            old = [weakref.ref(part) for part in trainer.sharded.parts]
            old += [weakref.ref(each) for _, each in trainer.sharded.named_parameters()]
            trainer.reshard(after[0])
            watched.left = [f"{type(each())}" for each in old if each() is not None]
            watched.loaded = _parts(trainer, Shards(after[1]))
            _watch_saves(trainer, watched, after[1])
        return make_step(step)

    trainer._step = reshard_and_step
    trainer.train()
    return watched


def _watch_saves(trainer: Trainer, watched: Watched, layout: Layout) -> None:
    """Keep what the ranks of a layout hold whenever it is saved."""
    save, shards = trainer.checkpointer.save, Shards(layout)

    def save_and_keep(step: int, state: dict[str, Any], **how: Any) -> None:
        watched.saved[step] = _parts(trainer, shards)
        save(step, state, **how)

    trainer.checkpointer.save = save_and_keep


def _parts(trainer: Trainer, shards: Shards) -> dict[str, Part]:
    """This rank's parts of parameters, the optimizer's state and the routers' buffers."""
    found = {}
    for name, parameter in trainer.sharded.named_parameters():
        box = shards.box(dist.get_rank(), name, parameter.shape)
        for kind, tensor in [("parameter", parameter), *trainer.optimizer.state[parameter].items()]:
            values = local_part(tensor.detach()).numpy().copy()
            found[f"{kind} {name}"] = Part(box if tensor.ndim else (), tuple(tensor.shape), values)
    for layer, moe in trainer.sharded.moe_layers().items():
        for buffer in ("expert_bias", "previous_load"):
            tensor = getattr(moe.router, buffer)
            values = tensor.numpy().copy()
            found[f"{buffer} {layer}"] = Part((slice(None),), tuple(tensor.shape), values)
    return found


def _whole(ranks: list[dict[str, Part]]) -> dict[str, np.ndarray]:
    """Puts whole tensors together.

    Raises AssertionError when a tensor has a gap, or replicas of a part differ.
    """
    tensors: dict[str, np.ndarray] = {}
    for rank, parts in enumerate(ranks):
        for name, part in parts.items():
            tensor = tensors.setdefault(name, np.full(part.shape, np.nan))
            known = tensor[part.box]
            assert known.shape == part.values.shape, f"rank {rank}: {name} has {part.values.shape}"
            same = np.isnan(known) | (known == part.values)
            assert np.all(same), f"rank {rank}: {name} differs"
            tensor[part.box] = part.values
    gaps = [name for name, tensor in tensors.items() if np.isnan(tensor).any()]
    assert not gaps, f"no rank holds all of {gaps}"
    return tensors


def _differences(expected: list[dict[str, Part]], found: list[dict[str, Part]]) -> list[str]:
    """Names of tensors that are on one side only, or differ."""
    ours, theirs = _whole(found), _whole(expected)
    names = sorted(ours.keys() | theirs.keys())
    return [n for n in names if not np.array_equal(ours.get(n, ()), theirs.get(n, ()))]


def _stored_twice(folder: Path) -> list[str]:
    """Names of tensors of which a checkpoint stores more or fewer elements than there are."""
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    return [
        name
        for name, entry in stored.items()
        if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel()
    ]


def problems(source: Run, ours: Run) -> list[str]:
    """Why `ours` is not `source` gone on with after LEG steps."""
    loaded = [rank.loaded for rank in ours.ranks]
    lines = [
        f"{name} is not what was saved"
        for name in _differences([rank.saved[LEG] for rank in source.ranks], loaded)
    ]
    manifests = [ran.read(LEG, "manifest.json")["checksums"] for ran in (source, ours)]
    if manifests[0] != manifests[1]:
        lines.append("saved again, the checksums are others")
    places = [ran.read(LEG, "train_state.json")["data"]["rows"] for ran in (source, ours)]
    if places[0] != places[1]:
        lines.append("saved again, the data position is another")
    lines += [f"{name} is stored twice" for name in _stored_twice(ours.checkpoint(LEG))]
    return lines + _other_steps(source, ours, rel=1e-9)


def _other_steps(theirs: Run, ours: Run, rel: float) -> list[str]:
    """Steps after LEG that read other data, or have other figures by more than `rel`."""
    lines = []
    for step in range(LEG + 1, 2 * LEG + 1):
        if ours.logged(step, "data") != theirs.logged(step, "data"):
            lines.append(f"step {step} has another global batch")
        expected, found = (run.logged(step, *_CURVE) for run in (theirs, ours))
        if found != pytest.approx(expected, rel=rel, abs=0):
            lines.append(f"step {step} gives {found}, not {expected}")
    return lines


def unlike(live: Run, through_disk: Run) -> list[str]:
    """Why a run that was resharded while it trained is not the one that went on from a checkpoint:
    nothing if all bits are the same."""
    runs, end = (through_disk, live), 2 * LEG
    lines = [f"still in memory: {each}" for rank in live.ranks for each in rank.left]
    for when, (theirs, ours) in {
        "afterwards": [[rank.loaded for rank in ran.ranks] for ran in runs],
        "at the end": [[rank.saved[end] for rank in ran.ranks] for ran in runs],
    }.items():
        lines += [f"{name} is another {when}" for name in _differences(theirs, ours)]
    lines += _other_steps(through_disk, live, rel=0)
    for what in ("manifest.json", "train_state.json"):
        theirs, ours = (ran.read(end, what) for ran in runs)
        keys = sorted(theirs.keys() - {"job", "sha256"})
        lines += [f"{what} has another {key}" for key in keys if ours.get(key) != theirs[key]]
    return lines
