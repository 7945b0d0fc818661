"""A run that compiles nothing does not import torch's compiler."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.jobs import command
from titan_moe.runtime.process_pool import TIMEOUT_S

_RUN = """
import os, sys
from titan_moe.train import prepare
from titan_moe.runtime.launch import Launch
from titan_moe.runtime.process import process_group
job, model = prepare(sys.argv[1:], 1, os.environ)
from titan_moe.trainer import train
with process_group(Launch.from_environment(os.environ), job.comm, os.environ) as process:
    train(job, model, process)
print(*[name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
"""


def test_one_rank_that_compiles_nothing_leaves_the_compiler_out(tmp_path: Path) -> None:
    _, *words = command(tmp_path, activation_checkpoint__mode="none")
    run = subprocess.run(
        [sys.executable, "-c", _RUN, *words],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1].strip() == "", "the compiler was imported"
