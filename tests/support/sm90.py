"""Compiles Triton kernels for sm_90, and reads from the assembler how much they spill."""

import re
import subprocess
import tempfile
from typing import Any

_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


def compile_kernel(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    num_warps: int = 4,
    attrs: dict[tuple[int, ...], Any] | None = None,
) -> Any:
    """Compiles a Triton function for sm_90, and returns Triton's object with the assembly. Without
    `attrs` tensors are aligned to 16 bytes, as torch's are, and strides are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in types.items()
        if kind.startswith("*") or name.endswith("_stride")
    }
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=aligned if attrs is None else attrs,
    )
    options = {"num_warps": num_warps}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def spilled_bytes(compiled: Any) -> int:
    """Returns the bytes that a compiled kernel spills, by the ptxas that Triton itself calls: a
    wheel has several, and one may be too old for the PTX."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "Used" in report, report
    return sum(int(number) for pair in _SPILLS.findall(report) for number in pair)
