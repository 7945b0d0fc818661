"""Runs that stop in one layout and go on in another, watched from outside."""

import json
import shutil
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.paths import DEBUG_CONFIGS
from tests.support.pieces import Piece, differences, odd_slices, pieces, waste, whole
from titan_moe.checkpoint.manifest import Manifest, read_manifest
from titan_moe.config.checks.job import check
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import load_job
from titan_moe.metrics import curves
from titan_moe.models.config import ModelConfig
from titan_moe.models.registry import model_config
from titan_moe.runtime.process import Process
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.trainer import Trainer
from titan_moe.verify.gradients.fixture import at_depth
from titan_moe.verify.layouts.layouts import Layout, apply_layout
from titan_moe.verify.layouts.shards import Shards, tensor_dims

ROWS = 24
"""Rows of a global batch: each of 1, 2, 3, 4, 6 and 8 data ranks gets some."""
LEG = 2
"""Steps from one change of layout to the next, and from one checkpoint to the next."""
LONGEST = 3 * LEG


@dataclass
class Watched:
    """What one rank saw in a run."""

    rows: dict[int, list[tuple[Any, ...]]] = field(default_factory=dict)
    """By step: tokens, labels, documents and sample names of its rows, in order."""
    saved: dict[int, dict[str, Piece]] = field(default_factory=dict)
    """By step: all that it held when that step was saved."""
    loaded: dict[str, Piece] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    """Modules and parameters that a change of layout left in memory."""
    odd_slices: list[str] = field(default_factory=list)
    """Parameters that lie elsewhere by local_slices than by arithmetic."""


@dataclass
class Run:
    """One run or one leg of it, over all its ranks."""

    layout: Layout
    folder: Path
    ranks: list[Watched]

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoint" / f"step-{step}"

    def manifest(self, step: int) -> Manifest:
        return read_manifest(self.checkpoint(step))

    def data_position(self, step: int) -> dict[str, Any]:
        return json.loads((self.checkpoint(step) / "train_state.json").read_text())["data"]

    def curve(self) -> dict[int, tuple[float, ...]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        keys = ("loss", "grad_norm", "balance_loss")
        return {line["step"]: tuple(line[key] for key in keys) for line in map(json.loads, lines)}

    def global_batch(self, step: int) -> list[tuple[Any, ...]]:
        """All rows of a step in their order; ranks that should read the same rows must have."""
        shards = Shards(self.layout)
        of_place: dict[int, list[tuple[Any, ...]]] = {}
        for rank, watched in enumerate(self.ranks):
            place = shards.coordinate(rank, "dp_replicate") * self.layout.dp_shard
            place += shards.coordinate(rank, "dp_shard")
            rows = of_place.setdefault(place, watched.rows[step])
            assert rows == watched.rows[step], f"rank {rank} reads other rows than its replica"
        return [row for place in sorted(of_place) for row in of_place[place]]


def make_job(
    family: str,
    layout: Layout,
    folder: Path,
    *,
    steps: int,
    rows: int = ROWS,
    optimizer: dict[str, Any] | None = None,
) -> JobConfig:
    """The family's gate configuration in a layout, in float64, with a checkpoint every LEG."""
    job = load_job(["--job.config_file", str(DEBUG_CONFIGS / f"gate_{family}.toml")])
    own = rows // layout.data_ranks
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
            "global_batch_size": rows,
            "steps": steps,
            # Text would cost each rank the import of `datasets`, half of what it computes here.
            "dataset": "synthetic",
            "dataset_path": None,
        },
        "job": {"dump_folder": str(folder)},
        "lr_scheduler": {"total_steps": LONGEST},
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
    save_last: bool = False,
    plant: Callable[[], None] | None = None,
    optimizer: dict[str, Any] | None = None,
) -> Run:
    """Train to `steps` on a model of `depth` layers; goes on from the folder's last checkpoint.

    `plant` runs on every rank before anything else. The end is saved only for those who go on.
    """
    job = make_job(family, layout, folder, steps=steps, optimizer=optimizer)
    config = at_depth(model_config(family, "gate"), depth)
    problems = check(job, config, layout.world_size)
    assert not problems, f"{layout}: {problems}"
    ranks = run_on_ranks(train_watched, layout.world_size, job, config, layout, save_last, plant)
    return Run(layout, folder, ranks)


def go_on(family: str, source: Run, step: int, layout: Layout, folder: Path, **how: Any) -> Run:
    """Train LEG steps more from a checkpoint of another run, in a folder of its own."""
    target = folder / "checkpoint" / f"step-{step}"
    shutil.copytree(source.checkpoint(step), target)
    return run(family, layout, folder, steps=step + LEG, **how)


def train_watched(
    job: JobConfig,
    config: ModelConfig,
    layout: Layout,
    save_last: bool,
    plant: Callable[[], None] | None,
) -> Watched:
    """On every rank: train as titan_moe.train does; what was loaded is saved again at once."""
    curves.plot_curves = lambda *_, **__: None  # A second of a run's few.
    if plant is not None:
        plant()
    process = Process(
        rank=dist.get_rank(), world_size=dist.get_world_size(), device=torch.device("cpu")
    )
    trainer = Trainer(job, config, process)
    watched = Watched()
    resume, save = trainer._resume, trainer.checkpointer.save
    _watch_saves(trainer, watched, layout, save_last)

    def resume_and_save_again() -> None:
        resume()
        if trainer.progress.step > 0:
            watched.loaded = pieces(trainer, Shards(layout, tensor_dims()))
            save(trainer.progress.step, trainer._state())
        _watch_rows(trainer, watched)

    trainer._resume = resume_and_save_again
    trainer.train()
    return watched


def _watch_saves(trainer: Trainer, watched: Watched, layout: Layout, save_last: bool) -> None:
    """Keep what the ranks of a layout hold whenever it is saved."""
    save, shards = trainer.checkpointer.save, Shards(layout, tensor_dims())

    def save_and_keep(step: int, state: dict[str, Any], *, last: bool = False, **how: Any) -> None:
        if save_last or not last:
            watched.saved[step] = pieces(trainer, shards)
            save(step, state, last=last, **how)

    trainer.checkpointer.save = save_and_keep
    watched.odd_slices += odd_slices(trainer, shards)


def _watch_rows(trainer: Trainer, watched: Watched) -> None:
    """Keep the rows that the loader hands out."""
    next_step = trainer.data.loader.next_step

    def next_step_and_keep() -> list:
        batches = next_step()
        rows = [row for batch in batches for row in _rows(batch)]
        watched.rows[trainer.progress.step + 1] = rows
        return batches

    trainer.data.loader.next_step = next_step_and_keep


def run_and_reshard(
    family: str,
    layouts: tuple[Layout, Layout],
    folder: Path,
    *,
    depth: int,
    plant: Callable[[], None] | None = None,
) -> Run:
    """Train LEG steps in one layout, and LEG more in the other without a restart."""
    before, after = (make_job(family, each, folder, steps=2 * LEG) for each in layouts)
    config = at_depth(model_config(family, "gate"), depth)
    world_size = layouts[0].world_size
    ranks = run_on_ranks(reshard_watched, world_size, before, after, config, layouts[1], plant)
    return Run(layouts[1], folder, ranks)


def reshard_watched(
    before: JobConfig,
    after: JobConfig,
    config: ModelConfig,
    layout: Layout,
    plant: Callable[[], None] | None,
) -> Watched:
    """On every rank: train, and go on in the other layout after LEG steps."""
    curves.plot_curves = lambda *_, **__: None
    if plant is not None:
        plant()
    process = Process(
        rank=dist.get_rank(), world_size=dist.get_world_size(), device=torch.device("cpu")
    )
    trainer, watched = Trainer(before, config, process), Watched()
    make_step = trainer._step

    def reshard_and_step(step: int) -> None:
        if step == 1:  # Training draws no random numbers, and so would not show their states.
            torch.rand(1 + dist.get_rank())
        if step == LEG + 1:
            old = [weakref.ref(part) for part in trainer.sharded.parts]
            old += [weakref.ref(each) for _, each in trainer.sharded.named_parameters()]
            trainer.reshard(after)
            watched.left = [f"{type(each())}" for each in old if each() is not None]
            watched.loaded = pieces(trainer, Shards(layout, tensor_dims()))
            _watch_saves(trainer, watched, layout, save_last=True)
            _watch_rows(trainer, watched)
        make_step(step)

    trainer._step = reshard_and_step
    trainer.train()
    return watched


def unlike(live: Run, through_disk: Run) -> list[str]:
    """Why a run that was resharded while it trained is not the one that went on from its
    checkpoint: nothing if all bits are the same."""
    lines = [line for ran in (live, through_disk) for rank in ran.ranks for line in rank.odd_slices]
    lines += [f"still in memory: {each}" for rank in live.ranks for each in rank.left]
    end = 2 * LEG
    for when, ours, theirs in [
        ("afterwards", *([rank.loaded for rank in ran.ranks] for ran in (live, through_disk))),
        ("at the end", *([rank.saved[end] for rank in ran.ranks] for ran in (live, through_disk))),
    ]:
        lines += [f"{name} is another {when}" for name in differences(whole(theirs), whole(ours))]
    for step in range(LEG + 1, end + 1):
        if live.global_batch(step) != through_disk.global_batch(step):
            lines.append(f"step {step} has another global batch")
        if live.curve()[step] != through_disk.curve()[step]:
            lines.append(f"step {step}: {live.curve()[step]}, not {through_disk.curve()[step]}")
    for what in ("manifest.json", "train_state.json"):
        ours, theirs = (
            json.loads((ran.checkpoint(end) / what).read_text()) for ran in (live, through_disk)
        )
        keys = [key for key in theirs if key != "job" and ours.get(key) != theirs[key]]
        lines += [f"{what} has another {key}" for key in keys]
    return lines


def _rows(batch: Any) -> list[tuple[Any, ...]]:
    tensors = (batch.tokens_BS, batch.labels_BS, batch.documents_BS)
    contents = [tensor.numpy().tobytes() for row in zip(*tensors, strict=True) for tensor in row]
    return [
        (*contents[3 * row : 3 * row + 3], tuple(names)) for row, names in enumerate(batch.samples)
    ]


def problems(source: Run, ours: Run, reference: Run, step: int) -> list[str]:
    """Why `ours` is not `source` gone on with after `step`, as `reference` went on."""
    lines = [line for ran in (source, ours) for rank in ran.ranks for line in rank.odd_slices]
    saved = whole([rank.saved[step] for rank in source.ranks])
    for name in differences(saved, whole([rank.loaded for rank in ours.ranks])):
        lines.append(f"{name} is not what was saved")
    if ours.manifest(step).checksums != source.manifest(step).checksums:
        lines.append("saved again, the checksums are others")
    if ours.data_position(step)["rows"] != source.data_position(step)["rows"]:
        lines.append("saved again, the data position is another")
    lines += waste(ours.checkpoint(step))
    curve, expected = ours.curve(), reference.curve()
    for later in range(step + 1, step + LEG + 1):
        if ours.global_batch(later) != reference.global_batch(later):
            lines.append(f"step {later} has another global batch")
        if curve[later] != pytest.approx(expected[later], rel=1e-9):
            lines.append(f"step {later} gives {curve[later]}, not {expected[later]}")
    return lines
