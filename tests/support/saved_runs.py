"""Runs of a toy model in this process, their checkpoints, and what refuses one."""

import pytest
import torch
from torch import nn

from titan_moe.checkpoint.checkpointer import Checkpointer
from titan_moe.config.job_config import Checkpoint
from titan_moe.runtime.errors import RunError


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
        options = Checkpoint(**{"enable": True, **config})
        self.checkpointer = Checkpointer(
            options,
            folder,
            modules=[self.model],
            optimizer=self.optimizer,
            job_record={"training": {"steps": 3}, "checkpoint": options.model_dump(mode="json")},
            merge_data=lambda states: states[0],
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


def step_folder(folder, step):
    """Of a run's folder."""
    return folder / "checkpoint" / f"step-{step}"


def names(folder):
    """What lies beside the checkpoints of a run."""
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
