"""Small trainings on ranks of this machine, disturbed or killed on request."""

import json
import os
import signal
from pathlib import Path

from titan_moe.config.job_config import JobConfig

STEPS = 20


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


def train_here(
    job: JobConfig, *, disturb: bool = False, kill: tuple[str, int] | None = None
) -> bool:
    """Train on this rank; `disturb` starts from other random states and a warm thread pool. Returns
    whether the run stopped before its last step, saved."""
    import torch
    import torch.distributed as dist

    from titan_moe.metrics import curves
    from titan_moe.models.hf import model_of_job
    from titan_moe.runtime.process import Process
    from titan_moe.trainer import train

    curves.plot_curves = lambda *_, **__: None  # The picture takes as long as many steps.
    if disturb:
        torch.manual_seed(12345)
        torch.set_num_threads(2)
        (torch.randn(700, 700) @ torch.randn(700, 700)).sum()
        torch.set_num_threads(1)
    if kill is not None:
        _plant_kill(*kill)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    process = Process(rank=rank, world_size=world_size, device=torch.device("cpu"))
    return train(job, model_of_job(job.model), process)


def _plant_kill(where: str, rank: int) -> None:
    """Let this process die by SIGKILL in the second half of the run."""
    import torch.distributed as dist

    from titan_moe import train_step
    from titan_moe.checkpoint import folder as folders
    from titan_moe.checkpoint.tensors import FolderWriter

    if dist.get_rank() != rank:
        return
    owner, name, number = {
        "in a step": (train_step, "update_routers", 12),
        "writing tensors": (FolderWriter, "write_data", 2),
        "before the rename": (folders, "commit", 2),
    }[where]
    calls, original = iter(range(100)), getattr(owner, name)

    def die_at_the_call(*args, **kwargs):
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, die_at_the_call)


def figures(folder: Path) -> list[tuple]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "balance_loss")
    return [tuple(line[key] for key in keys) for line in lines]


def checksums(folder: Path) -> dict:
    """Of every parameter, buffer and optimizer tensor after the last step."""
    return json.loads((folder / f"checkpoint/step-{STEPS}/manifest.json").read_text())["checksums"]
