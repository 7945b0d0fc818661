"""Kernels that torch's compiler makes for sm_90, of graphs that run on fake tensors.

Inductor makes them as on an H100, whose properties cudart.c tells, and Triton and ptxas compile
them. None is launched: the graph runs one operation after another, so that its backward is traced
and compiled too. Inductor mostly tries a few tiles of a kernel and times them; here the one with
the fewest spills stands for those, for it leaves out by itself what spills more than a little.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import fx

from scripts.rehearsal.fake_cuda import CUDA
from scripts.rehearsal.ledger import Finding
from scripts.rehearsal.places import Place
from scripts.rehearsal.sm90 import SHARED_BYTES, Taken, h100, taken

LARGE_SPILL = 2 * 2 * 255 * 4
"""Bytes: as if a thread wrote all of its 255 registers to memory and read them back, twice. Tiles
are torch's choice and not ours, so a smaller spill is told and is no finding."""


class Made(NamedTuple):
    """Of one case."""

    kernels: list[Taken]
    findings: list[Finding]

    def in_words(self) -> list[str]:
        """A line for all kernels, and one for each that spills."""
        if not self.kernels:
            return ["no kernels"]
        registers = max(each.registers for each in self.kernels)
        shared = max(each.shared_bytes for each in self.kernels)
        spilling = [each for each in self.kernels if each.spilled_bytes]
        return [
            f"{len(self.kernels)} kernels, {len(spilling)} spill; at most {registers} registers "
            f"and {shared:,} bytes of shared memory",
            *(
                f"  {each.name} spills {each.spilled_bytes:,} bytes at {each.registers} registers"
                for each in spilling
            ),
        ]


def kernels_of(run: Callable[[], None], place: Place) -> Made:
    """What torch's compiler makes as `run` calls compiled functions. In a fresh process."""
    kernels: list[Taken] = []
    try:
        with _for_sm90(kernels):
            run()
    except Exception as error:  # A tile that no choice makes small enough, or any other refusal.
        said = str(error).strip().splitlines() or [""]
        why = next((line for line in said if "OutOfResources" in line), None)
        kind = "refused" if why is None else "does not fit"
        return Made(kernels, [Finding(kind, place, why or f"{type(error).__name__}: {said[0]}")])
    large = [each for each in kernels if each.spilled_bytes > LARGE_SPILL]
    return Made(kernels, [finding for each in large for finding in each.findings(place)])


class _Driver:
    """What Triton and torch ask of a driver in order to compile."""

    def get_current_target(self) -> Any:
        return h100()

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, *_: Any) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CUDA

    def get_device_interface(self) -> Any:
        return torch.cuda


@contextmanager
def _for_sm90(kernels: list[Taken]) -> Iterator[None]:
    import torch._inductor.compile_fx as compiler
    import torch._inductor.config as inductor
    import torch._inductor.runtime.triton_helpers as helpers
    import torch._inductor.runtime.triton_heuristics as heuristics
    from torch._dynamo.backends.debugging import boxed_nop
    from triton.runtime import driver
    from triton.runtime.errors import OutOfResources
    from triton.runtime.jit import JITFunction

    compile_fx, precompile = compiler.compile_fx, heuristics.CachingAutotuner.precompile

    def compile_only(graph: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        compiler.compile_fx_inner(copy.deepcopy(graph), inputs, **kwargs)
        return boxed_nop(graph, inputs)

    def call_compiler(*args: Any, **kwargs: Any) -> Any:
        return compile_fx(*args, **{"inner_compile": compile_only, **kwargs})

    def make_launcher(result: Any) -> Any:
        kernel = result.kernel
        found = taken(kernel.metadata.name, kernel)
        if found.shared_bytes > SHARED_BYTES:  # As torch does where a device has less.
            raise OutOfResources(found.shared_bytes, SHARED_BYTES, "shared memory")
        kernel.n_regs = found.registers  # By these Inductor adds a choice with a smaller tile.
        return SimpleNamespace(config=result.config, taken=found)

    def note(choices: Any, *args: Any, **kwargs: Any) -> None:
        precompile(choices, *args, **kwargs)
        fits = [launcher.taken for launcher in choices.launchers]
        kernels.append(min(fits, key=lambda each: each.spilled_bytes))

    def use_ours() -> None:
        driver.set_active(_Driver())

    settings = {
        "compile_threads": 1,
        "force_disable_caches": True,
        "use_static_triton_launcher": False,
        "shape_padding": False,  # It would time products to find out what padding gains.
    }
    use_ours()
    with inductor.patch(settings), ExitStack() as stack:
        for holder, name, value in (
            (compiler, "compile_fx", call_compiler),
            (helpers, "set_driver_to_gpu", use_ours),
            (heuristics.CachingAutotuner, "precompile", note),
            (heuristics.TritonCompileResult, "make_launcher", make_launcher),
            (JITFunction, "run", lambda *_, **__: None),  # Kernels of ours between two graphs.
        ):
            stack.enter_context(mock.patch.object(holder, name, value))
        yield
