"""Flex attention's kernels for sm_90, made by torch's compiler as in a run, and not run."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

# Read when torch's compiler is imported: no other processes, no caches.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from scripts.rehearsal.fake_cuda import CUDA
from scripts.rehearsal.sm90 import Taken, taken
from scripts.rehearsal.standins import Attention
from titan_moe.ops.attention import FlexCore

_SEQ_LEN = 4096


class _Driver:
    """What Triton asks of a driver to compile, without one."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, *_: Any) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CUDA

    def get_device_interface(self) -> Any:
        return torch.cuda


def attention_kernels(attention: Attention) -> list[Taken]:
    """The kernels of one attention, forward and backward. In a fresh process.

    Raises whatever torch's compiler raises where no choice of it fits.
    """
    num_heads, num_kv_heads, qk_dim, v_dim, dtype = attention
    torch.cuda.set_device(CUDA)

    def heads(number: int, dim: int) -> torch.Tensor:
        x = torch.zeros(1, _SEQ_LEN, number, dim, dtype=getattr(torch, dtype), device=CUDA)
        return x.transpose(1, 2).requires_grad_()

    query, key = heads(num_heads, qk_dim), heads(num_kv_heads, qk_dim)
    value = heads(num_kv_heads, v_dim)
    found: list[Taken] = []
    with _compiled_only(found):
        core = FlexCore(mask_documents=True, compiled=True)
        mask = core.mask(torch.zeros(1, _SEQ_LEN, dtype=torch.int32, device=CUDA))
        core(query, key, value, mask, qk_dim**-0.5).sum().backward()
    return found


@contextmanager
def _compiled_only(found: list[Taken]) -> Iterator[None]:
    """Let torch's compiler make kernels, note what they take, and launch none."""
    import torch._inductor.config as inductor
    import torch._inductor.runtime.triton_helpers as helpers
    import torch._inductor.runtime.triton_heuristics as heuristics

    def make_launcher(result: Any) -> Any:
        found.append(taken(result.kernel.metadata.name, result.kernel))

        def launch(*args: Any, **kwargs: Any) -> None:
            pass

        launch.config, launch.shared = result.config, result.kernel.metadata.shared  # type: ignore[attr-defined]
        launch.n_regs = launch.n_spills = 0  # type: ignore[attr-defined]
        launch.store_cubin, launch.cache_hash = False, "none"  # type: ignore[attr-defined]
        return launch

    def use_ours() -> None:
        driver.set_active(_Driver())

    use_ours()
    with ExitStack() as stack:
        for holder, name, value in (
            (inductor, "compile_threads", 1),
            (inductor, "use_static_triton_launcher", False),
            (helpers, "set_driver_to_gpu", use_ours),
            (helpers, "set_driver_to_cpu", lambda: None),
            (heuristics.TritonCompileResult, "make_launcher", make_launcher),
        ):
            stack.enter_context(mock.patch.object(holder, name, value))
        yield
