"""Writes the Triton kernels that Inductor makes of a function for an H100, and compiles them for
sm_90, with a torch that knows no CUDA."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.support.sm90 import compile_kernel

_H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=80 << 30,
)
_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)'''", re.DOTALL)


class _WrittenError(Exception):
    """Ends a compilation whose code is known."""


def inductor_ptx(
    function: Callable[..., Any], args: list[Tensor], folder: Path, *, dynamic: bool | None
) -> list[str]:
    """Returns the PTX of each kernel of a function, in each configuration that Inductor tries.

    Args:
        args: FakeTensors on CUDA, without gradients: this torch has no autograd for them.
        folder: where the kernels' sources are written.
        dynamic: as for torch.compile.
    """
    found = []
    with _fake_h100() as codes:
        torch._dynamo.reset()
        try:
            torch.compile(function, dynamic=dynamic)(*args)
        except Exception:
            if not codes:
                raise
        for name, source in _KERNEL.findall(codes[0]):
            kernel = _loaded(name, source, folder)
            meta = kernel.triton_meta
            for config in kernel.configs:
                types = {k: v for k, v in meta["signature"].items() if v != "constexpr"}
                compiled = compile_kernel(
                    kernel.fn, types, config.kwargs, config.num_warps, meta["configs"][0]
                )
                found.append(compiled.asm["ptx"])
    return found


def _loaded(name: str, source: str, folder: Path) -> Any:
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


@contextmanager
def _fake_h100() -> Iterator[list[str]]:
    """Shows torch and Triton an H100; yields what Inductor writes, which is not loaded."""
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config, scheduler
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget

    codes: list[str] = []

    def read(code: str) -> None:
        codes.append(code)
        raise _WrittenError

    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0
    )
    shown = [
        (CudaInterface, "get_device_properties", lambda *_: _H100),
        (CudaInterface, "get_compute_capability", lambda *_: 90),
        (CudaInterface, "is_bf16_supported", lambda **_: True),
        (torch.cuda, "get_device_properties", lambda *_: _H100),
        (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        (scheduler, "has_triton", lambda: True),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
        # Patterns and constants are computed with real tensors.
        (config, "joint_graph_constant_folding", False),
        (joint_graph, "lazy_init", lambda *_: None),
        (post_grad, "lazy_init", lambda *_: None),
        (GraphLowering, "save_output_code", read),
        (triton.runtime.driver, "_active", driver),
    ]
    with ExitStack() as stack:
        for owner, name, value in shown:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield codes
