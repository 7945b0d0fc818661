"""No operation of a training step lacks a deterministic kernel on CUDA.

What a step runs on the CPU shows it, as far as both devices run the same operations. The CPU's own
kernels of titan_moe's operations are not looked into; their CUDA kernels are Triton's, in
which nothing is added atomically, or are seen by scripts/rehearse.sh.
"""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.rehearsal.deterministic import is_refused
from scripts.rehearsal.places import here
from tests.support.paths import DEBUG_CONFIGS, REPO
from tests.support.tiny import tiny_step
from titan_moe.config.parse import load_job
from titan_moe.models.hf import model_of_job
from titan_moe.models.registry import FAMILIES
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.verify.gradients.fixture import make_batch, own_batches


class Refused(TorchDispatchMode):
    """Notes each place and operation that `is_refused` names."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if is_refused(func, args, kwargs or {}):
            self.found.add(f"{here().where}: {func.__name__}")
        return func(*args, **(kwargs or {}))


def train_on_rank(family: str) -> set[str]:
    job = load_job(["--job.config_file", str(DEBUG_CONFIGS / f"gate_{family}.toml")])
    config = model_of_job(job.model)
    _, step = tiny_step(job, config)
    batch = make_batch(2, job.training.seq_len, config.vocab_size, seed=1)
    with Refused() as seen:
        step(own_batches(batch, 1, 0, 1), logged=True)
    return seen.found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_operation_of_a_step_has_a_deterministic_kernel(family: str) -> None:
    assert run_on_ranks(train_on_rank, 1, family) == [set()]


def test_no_triton_kernel_adds_atomically() -> None:
    kernels = list((REPO / "titan_moe").rglob("*_triton.py"))
    assert kernels and not any("tl.atomic" in path.read_text("utf-8") for path in kernels)


_WHOLE, _FLOATS = torch.arange(6).view(2, 3), torch.rand(2, 3)
_REFUSED, _ALLOWED = "refused", "allowed"


@pytest.mark.parametrize(
    ("outcome", "call"),
    [
        (_REFUSED, lambda: _FLOATS.clone().cumsum_(0)),
        (_REFUSED, lambda: _WHOLE.cumsum(0, dtype=torch.float32)),
        (_ALLOWED, lambda: _WHOLE.cumsum(0)),
        (_REFUSED, lambda: _FLOATS.median(0)),
        (_ALLOWED, lambda: _FLOATS.median()),
        (_REFUSED, lambda: _WHOLE.flatten().bincount(torch.rand(6))),
        (_REFUSED, lambda: _FLOATS.clone().put_(_WHOLE, _FLOATS)),
        (_REFUSED, lambda: _FLOATS.scatter_reduce(0, _WHOLE % 2, _FLOATS, "prod")),
        (_ALLOWED, lambda: _FLOATS.scatter_reduce(0, _WHOLE % 2, _FLOATS, "sum")),
    ],
)
def test_operation_without_a_deterministic_kernel_is_found(outcome: str, call: Any) -> None:
    with Refused() as seen:
        call()
    assert bool(seen.found) == (outcome == _REFUSED)
