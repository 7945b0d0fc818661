"""Runs of a toy model in this process, their checkpoints, and what refuses one."""

import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from titan_moe.checkpoint.checkpointer import Checkpointer
from titan_moe.checkpoint.manifest import read_manifest, write_manifest
from titan_moe.config.job_config import Checkpoint
from titan_moe.models.hf import HFModel
from titan_moe.models.registry import model_config
from titan_moe.runtime.errors import RunError

UNTIED = HFModel("mixtral", model_config("mixtral", "gate"))


def plain_checkpointer(
    folder: Path,
    module: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | None = None,
    *,
    model: HFModel = UNTIED,
    job_record: Mapping[str, Any] = MappingProxyType({}),
    merge_data: Callable = lambda states: states[0],
    **keys: Any,
) -> Checkpointer:
    """Returns a checkpointer that saves into `folder`/checkpoint.

    Args:
        module: the model, or its stages.
        model: family and dimensions, for Hugging Face folders; else a model without tied weights.
        merge_data: joins the data positions of all ranks.
        keys: of the [checkpoint] table.
    """
    return Checkpointer(
        Checkpoint(**{"enable": True, **keys}),
        folder,
        modules=[module] if isinstance(module, nn.Module) else module,
        optimizer=optimizer,
        job_record=dict(job_record),
        merge_data=merge_data,
        model=model,
    )


def saved_model(folder: Path, module: nn.Module, **how: Any) -> Path:
    """Saves a model as `plain_checkpointer` does; returns the checkpoint."""
    plain_checkpointer(folder, module, **how).save(1, {})
    return step_folder(folder, 1)


class Toy(nn.Module):
    """A matrix, a bias and a stack of experts."""

    def __init__(self, dim, experts):
        super().__init__()
        self.linear = nn.Linear(dim, 4)
        self.w_EFD = nn.Parameter(torch.randn(experts, 3, dim))


class Run:
    """A model, its optimizer and its checkpointer; `seed` tells runs apart."""

    def __init__(self, folder, *, seed=0, dim=5, experts=2, **config):
        torch.manual_seed(seed)
        self.model = Toy(dim, experts)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        options = Checkpoint(**{"enable": True, **config}).model_dump(mode="json")
        record = {"training": {"steps": 3}, "checkpoint": options}
        self.checkpointer = plain_checkpointer(
            folder, self.model, self.optimizer, job_record=record, **config
        )

    def save(self, step, **options):
        state = {"step": step, "tokens": 0, "data": {"0": step * 10}}
        self.checkpointer.save(step, state, **options)

    @property
    def weight(self):
        return self.model.linear.weight.detach().clone()

    @property
    def moment(self):
        return self.optimizer.state[self.model.w_EFD]["exp_avg"].clone()


@contextmanager
def full_disk(num_bytes: int = 20_000) -> Iterator[None]:
    """Lets no file grow beyond this size while the block runs."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, unlimited[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


def step_folder(folder, step):
    """Returns the path of a checkpoint in a run's folder."""
    return folder / "checkpoint" / f"step-{step}"


def contents(step):
    """Returns the bytes of a checkpoint's files, by name."""
    return {path.name: path.read_bytes() for path in step.iterdir()}


def change_checksum(step, name):
    """Gives a tensor another checksum in a checkpoint's manifest, which agrees with its digest."""
    manifest = read_manifest(step)
    manifest.checksums[name] = "0123456789abcdef"
    write_manifest(step, manifest)


def names(folder):
    """Returns the names in a run's folder of checkpoints."""
    return sorted(path.name for path in (folder / "checkpoint").iterdir())


def refused(run, *words):
    """A `watched` run cannot load: one line with all the words, and no file has changed."""
    before = {path: path.stat().st_mtime_ns for path in run.folder_to_watch.rglob("*")}
    with pytest.raises(RunError) as caught:
        run.checkpointer.load()
    assert {path: path.stat().st_mtime_ns for path in run.folder_to_watch.rglob("*")} == before
    line = str(caught.value)
    assert "\n" not in line
    for word in words:
        assert str(word) in line, line


def watched(folder, **options):
    """A run that must leave the files of a folder as they are: see `refused`."""
    run = Run(folder, seed=1, **options)
    run.folder_to_watch = folder
    return run
