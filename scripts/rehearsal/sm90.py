"""Compiles launched kernels for sm_90, and reads their registers and memory from the assembler."""

import importlib
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from scripts.rehearsal.ledger import Finding
from scripts.rehearsal.places import Place
from scripts.rehearsal.standins import Launch

SHARED_BYTES = 227 * 1024
"""Shared memory of a kernel's block at capability 9.0 (CUDA programming guide)."""
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


class Taken(NamedTuple):
    """Resources of a compiled kernel."""

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int

    def findings(self, place: Place) -> Iterator[Finding]:
        if self.spilled_bytes:
            detail = f"{self.name} spills {self.spilled_bytes} bytes at {self.registers} registers"
            yield Finding("spills", place, detail)
        if self.shared_bytes > SHARED_BYTES:
            detail = (
                f"{self.name} wants {self.shared_bytes:,} bytes of shared memory, where a block "
                f"has {SHARED_BYTES:,}"
            )
            yield Finding("does not fit", place, detail)


def kernel_findings(launches: Iterable[Launch]) -> Iterator[Finding]:
    """Compiles each of our kernels as it was specialised, and yields the findings about it."""
    for launch in sorted(launches, key=str):
        kernel = getattr(importlib.import_module(launch.module), launch.name)
        types, constants = dict(launch.types), dict(launch.constants)
        path = launch.module.removeprefix("titan_moe.").replace(".", "/")
        place = Place(f"{path}.py:{launch.name}", kernel.fn.__code__.co_firstlineno)
        text = ", ".join(f"{name}={value}" for name, value in constants.items())
        kinds = " ".join(kind for kind in types.values() if kind.startswith("*"))
        compiled = compile_kernel(kernel, types, constants, launch.num_warps)
        yield from taken(f"{launch.name}[{kinds}; {text}]", compiled).findings(place)


def compile_kernel(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], num_warps: int = 4
) -> Any:
    """Compiles a Triton function for sm_90, and returns Triton's object with the assembly. Tensors
    are aligned to 16 bytes, as torch's are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name, kind in types.items()
            if kind.startswith("*")
        },
    )
    options = {"num_warps": num_warps}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def taken(name: str, compiled: Any) -> Taken:
    """Returns a compiled kernel's resources, from its PTX by the ptxas that Triton itself calls: a
    wheel has several, and one may be too old for the PTX."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = sum(int(number) for pair in _SPILLS.findall(report) for number in pair)
    registers = max(int(number) for number in _REGISTERS.findall(report))
    return Taken(name, registers, spills, compiled.metadata.shared)
