"""Start run_train.sh as a user does, on a tiny job."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.paths import REPO
from titan_moe.runtime.process_pool import TIMEOUT_S

EMPTY = REPO / "tests" / "support" / "empty.toml"

_TINY = {
    "model.name": "deepseek_v3",
    "model.flavor": "2M",
    "training.dataset": "synthetic",
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.steps": 2,
    "training.mixed_precision_param": "float32",
    "lr_scheduler.warmup_steps": 1,
    "metrics.log_freq": 1,
}


def command(folder: Path, **overrides: Any) -> list[str]:
    """run_train.sh on a job in `folder`; `table__key=value` overrides its keys."""
    keys = _TINY | {"job.dump_folder": folder}
    keys |= {key.replace("__", ".", 1): value for key, value in overrides.items()}
    return [str(REPO / "run_train.sh"), *(f"--{key}={value}" for key, value in keys.items())]


def environment(**variables: Any) -> dict[str, str]:
    """The environment of a user whose active Python is this one, on the CPU, with the defaults."""
    mine = {name: value for name, value in os.environ.items() if name != "CONFIG_FILE"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    mine |= {"PATH": path, "CONFIG_FILE": str(EMPTY), "CUDA_VISIBLE_DEVICES": "", "NGPU": "1"}
    return mine | {name: str(value) for name, value in variables.items()}


def run_train(
    folder: Path, variables: dict[str, Any] | None = None, **overrides: Any
) -> subprocess.CompletedProcess[str]:
    """Run to the end, within the limit of a test."""
    return subprocess.run(
        command(folder, **overrides),
        env=environment(**variables or {}),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
