"""Small trainings on ranks of this machine: altered, disturbed, killed, or with faults."""

import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.support.planting import Bug, plant
from titan_moe.comm.process import Process
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import load_job, resolve
from titan_moe.metrics.jsonl import read_json_lines
from titan_moe.models.hf import model_of_job
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.training.trainer import Trainer
from titan_moe.verify.compare.control_runs import batch_words
from titan_moe.verify.compare.records import RunRecord, read_run
from titan_moe.verify.compare.run_spec import RunSpec, Words

STEPS = 20
_LOGGED = {f"metrics.log_{what}": "true" for what in ("parameter_norms", "expert_counts")}


def make_job(folder: Path, *, steps: int = STEPS, dtype: str = "float32", **tables) -> JobConfig:
    base = {
        "job": {"dump_folder": str(folder)},
        "model": {"flavor": "2M"},
        "training": {
            "dataset": "synthetic",
            "local_batch_size": 2,
            "global_batch_size": 8,
            "seq_len": 64,
            "steps": steps,
            "mixed_precision_param": dtype,
        },
        "lr_scheduler": {"total_steps": STEPS, "warmup_steps": 5},
        "moe": {"global_aux_loss_weight": 0.01},
        "activation_checkpoint": {"mode": "none"},
        "checkpoint": {"enable": True, "interval": 5},
        "metrics": {"log_freq": 1},
    }
    return JobConfig.model_validate(
        {**base, **{key: {**base.get(key, {}), **table} for key, table in tables.items()}}
    )


def process_here() -> Process:
    cpu = torch.device("cpu")
    return Process(rank=dist.get_rank(), world_size=dist.get_world_size(), device=cpu)


def train_here(
    job: JobConfig,
    *,
    disturb: bool = False,
    kill: tuple[str, int] | None = None,
    alter: Callable[[Trainer], None] | None = None,
    bug: Bug | None = None,
    num_layers: int | None = None,
) -> bool:
    """Trains on this rank. Returns whether the run stopped before its last step, saved.

    Args:
        disturb: starts from other random states and a warm thread pool.
        alter: plants a mistake before the first step.
        bug: a mistake that is planted before the model is made.
        num_layers: instead of the flavor's.
    """
    if bug is not None:
        plant(bug)
    if disturb:
        torch.manual_seed(12345)
        torch.set_num_threads(2)
        (torch.randn(700, 700) @ torch.randn(700, 700)).sum()
        torch.set_num_threads(1)
    if kill is not None:
        _plant_kill(*kill)
    config = model_of_job(job.model)
    config = config if num_layers is None else replace(config, num_layers=num_layers)
    trainer = Trainer(job, config, process_here())
    if alter is not None:
        alter(trainer)
    return trainer.train()


def _plant_kill(where: str, rank: int) -> None:
    """Let this process die by SIGKILL at the third save, or in the fifth step."""
    from titan_moe.checkpoint import folder as folders
    from titan_moe.checkpoint.tensors import FolderWriter
    from titan_moe.training import train_step

    if dist.get_rank() != rank:
        return
    owner, name, number = {
        "in a step": (train_step, "update_routers", 5),
        "writing tensors": (FolderWriter, "write_data", 3),
        "before the rename": (folders, "commit", 3),
    }[where]
    replace_call(owner, name, number, lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def replace_call(owner: object, name: str, number: int, instead: Callable) -> None:
    """Replaces one call of a function, counted from 1, by a call of `instead` with the function and
    its arguments."""
    original, calls = getattr(owner, name), count(1)

    def called(*args, **kwargs):
        if next(calls) == number:
            return instead(original, *args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, called)


def figures(folder: Path) -> list[tuple]:
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "balance_loss")
    lines = read_json_lines(folder / "metrics.jsonl")
    return [tuple(line[key] for key in keys) for line in lines]


def checksums(folder: Path, step: int = STEPS) -> dict:
    """Returns checksums of every parameter, buffer and optimizer tensor after the last step."""
    return json.loads((folder / f"checkpoint/step-{step}/manifest.json").read_text())["checksums"]


def assert_same_run(ours: Path, theirs: Path, steps: int = STEPS) -> None:
    """Figures of every step, and all bits after the last one."""
    assert [line[0] for line in figures(ours)] == list(range(1, steps + 1))
    assert figures(ours) == figures(theirs)
    assert checksums(ours, steps) == checksums(theirs, steps)


def train_with_faults(
    job: JobConfig, faults: Mapping[int, str], *, kill_in: int | None = None
) -> bool:
    """Train on this rank; batches of the data are counted from 1. Spikes are judged by 4 norms.

    Args:
        faults: "spike", "nan" (an output) or "gradient" (infinite) by batch, on the last rank.
        kill_in: the last rank dies by SIGKILL in the step of so many batches read by this process.
    """
    from titan_moe.data.loader import Loader
    from titan_moe.models.output import Output
    from titan_moe.moe.experts import ExpertOutputs
    from titan_moe.training import bad_steps

    bad = dist.get_rank() == dist.get_world_size() - 1
    next_step, num_read, fault = Loader.next_step, 0, ""

    def counted(self):
        nonlocal num_read, fault
        batches = next_step(self)
        num_read += 1
        fault = faults.get(self.state_dict()["step"], "") if bad else ""
        if bad and num_read == kill_in:
            os.kill(os.getpid(), signal.SIGKILL)
        return batches

    experts, loss = ExpertOutputs.forward, Output.forward
    factors = {"spike": 1000.0, "gradient": float("inf")}

    def forward(self, rows, weights):
        y_RD = experts(self, rows, weights)
        return y_RD * float("nan") if fault == "nan" else y_RD

    def loss_with_spike(self, *args):
        value = loss(self, *args)
        if fault in factors and torch.is_grad_enabled():
            factor = factors[fault]
            value.register_hook(lambda grad: grad * factor)
        return value

    Loader.next_step, ExpertOutputs.forward, Output.forward = counted, forward, loss_with_spike
    bad_steps.FEWEST = 4
    return train_here(job)


def train_leaving_out_update(job: JobConfig, step: int) -> bool:
    """Train on this rank, without the update of a step."""
    from titan_moe.training.train_step import TrainStep

    replace_call(TrainStep, "_update", step, lambda *_: None)
    return train_here(job)


def train_curve(spec: RunSpec, folder: Path, words: Words = (), **how: Any) -> RunRecord:
    """Returns a run's loss, the norms of all parameters ("norm of NAME") and loads of all experts.

    Args:
        words: keys besides the spec's.
        how: arguments of `train_here` on every rank.
    """
    keys = dict((*batch_words(spec, spec.job()), *words)) | _LOGGED
    keys |= {"metrics.log_freq": "1", "job.dump_folder": str(folder)}
    job = resolve(load_job([*spec.file(), *spec.arguments(*keys.items())]), spec.world_size)
    run_on_ranks(partial(train_here, **how), spec.world_size, job)
    curve = read_run(folder)
    lines = read_json_lines(folder / "parameter_norms.jsonl")
    names = lines[0].keys() - {"step"}
    norms = {f"norm of {name}": np.array([line[name] for line in lines]) for name in names}
    return replace(curve, scalars={**curve.scalars, **norms})
