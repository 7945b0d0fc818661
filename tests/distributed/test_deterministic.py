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
from titan_moe.verify.gradients.fixture import make_rows
from titan_moe.verify.gradients.worker import own_batches


class Refused(TorchDispatchMode):
    """Notes each place and operation that `is_refused` names."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, None] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if is_refused(func, args, kwargs):
            self.found[f"{here().where}: {func.__name__}"] = None
        return func(*args, **kwargs)


def train_on_rank(family: str) -> list[str]:
    job = load_job(["--job.config_file", str(DEBUG_CONFIGS / f"gate_{family}.toml")])
    config = model_of_job(job.model)
    _, step = tiny_step(job, config)
    rows = make_rows(2, job.training.seq_len, config.vocab_size, seed=1)
    with Refused() as seen:
        step(own_batches(rows, 1, 0, 1), logged=True)
    return list(seen.found)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_operation_of_a_step_has_a_deterministic_kernel(family: str) -> None:
    assert run_on_ranks(train_on_rank, 1, family) == [[]]


def test_no_triton_kernel_adds_atomically() -> None:
    kernels = list((REPO / "titan_moe").rglob("*_triton.py"))
    assert len(kernels) >= 4
    assert not [path for path in kernels if "tl.atomic" in path.read_text(encoding="utf-8")]


_WHOLE, _FLOATS = torch.arange(6).view(2, 3), torch.rand(2, 3)
_FIRST = torch.zeros(2, 3, dtype=torch.int64)
_REFUSED: list[Any] = [
    lambda: _FLOATS.cumsum(0),
    lambda: _FLOATS.clone().cumsum_(0),
    lambda: _WHOLE.cumsum(0, dtype=torch.float32),
    lambda: _FLOATS.median(0),
    lambda: _FLOATS.histc(),
    lambda: _WHOLE.flatten().bincount(torch.rand(6)),
    lambda: _FLOATS.clone().put_(_FIRST, _FLOATS),
    lambda: _FLOATS.scatter_reduce(0, _FIRST, _FLOATS, "prod"),
]
_ALLOWED: list[Any] = [
    lambda: _WHOLE.cumsum(0),
    lambda: _FLOATS.median(),
    lambda: _WHOLE.flatten().bincount(),
    lambda: _FLOATS.scatter_reduce(0, _FIRST, _FLOATS, "sum"),
    lambda: _FLOATS.scatter(0, _FIRST, _FLOATS),
]


@pytest.mark.parametrize("call", [*_REFUSED, *_ALLOWED])
def test_operation_without_a_deterministic_kernel_is_found(call: Any) -> None:
    with Refused() as seen:
        call()
    assert bool(seen.found) == (call in _REFUSED)
