"""The Triton kernels compile for Hopper, which needs no GPU: the interpreter lets pass what a
compiler refuses."""

import re

import pytest
import torch

from tests.support.gated_cases import ACTIVATIONS
from tests.support.sm90 import compile_kernel, spilled_bytes

pytest.importorskip("triton")


SHARED_BYTES = 227 * 1024
"""Shared memory of a kernel's block at capability 9.0 (CUDA programming guide)."""


def compiled(kernel, pointers: dict[str, str], numbers: list[str], warps=4, **constants: int):
    """Returns the kernel's assembly, in which no register is spilled to memory, and which fits into
    the shared memory of a block."""
    types = pointers | dict.fromkeys(numbers, "i32")
    found = compile_kernel(kernel, types, constants, warps)
    assert spilled_bytes(found) == 0
    assert found.metadata.shared <= SHARED_BYTES
    return found.asm


@pytest.mark.slow
def test_kernel_with_too_large_a_tile_spills() -> None:
    from titan_moe.ops import move_rows_triton as kernels

    constants = {"DIM": 2048, "TOKENS": 16, "COLUMNS": 512, "TOP_K": 8, "WIDE": 0}
    types = dict.fromkeys(["y_ptr", "other_ptr", "out_ptr"], "*bf16")
    types |= {"rows_ptr": "*i64", "num_tokens": "i32"}
    compiled = compile_kernel(kernels._add_rows_kernel, types, constants, num_warps=1)
    assert spilled_bytes(compiled) > 0


@pytest.mark.parametrize("counts", ["*i32", "*i64"])
def test_permute_indices_compiles(counts: str) -> None:
    from titan_moe.ops.permute_indices_triton import _permute_indices_kernel

    pointers = {"counts_ptr": counts, "source_ptr": "*i64", "position_ptr": "*i64"}
    pointers |= {"offsets_ptr": "*i32"}
    constants = {"NUM_RANKS": 8, "NUM_EXPERTS": 12, "EXPERTS": 16, "ALIGNMENT": 16, "BLOCK": 512}
    asm = compiled(_permute_indices_kernel, pointers, ["num_rows", "max_rows"], **constants)
    assert asm["cubin"]


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("index", ["*i32", "*i64"])
@pytest.mark.parametrize("dim", [1, 1536, 2048])
def test_rows_compile_and_move_16_bytes_at_a_time(dim: int, index: str, two: bool):
    """A row's place is computed in 64 bits, also from an index of 32."""
    from titan_moe.ops import move_rows_triton as kernels

    rows, columns = kernels._tile(dim, kernels._TILE)
    constants = {"DIM": dim, "ROWS": rows, "COLUMNS": columns}
    pointers = {"x_ptr": "*bf16", "source_ptr": index, "out_ptr": "*bf16"}
    asm = compiled(kernels._copy_rows_kernel, pointers, ["num_rows"], **constants)
    assert not re.search(r"muli .*x1xi32>", asm["ttir"])
    assert dim == 1 or ("ld.global.v4.b32" in asm["ptx"] and "st.global.v4.b32" in asm["ptx"])

    constants = {"DIM": dim, "TOKENS": rows // 2 or 1, "COLUMNS": columns, "TOP_K": 8, "WIDE": 0}
    pointers = {"y_ptr": "*bf16", "rows_ptr": index, "out_ptr": "*bf16"}
    (pointers if two else constants)["other_ptr"] = "*bf16" if two else None
    asm = compiled(kernels._add_rows_kernel, pointers, ["num_tokens"], **constants)
    assert not re.search(r"muli .*x1xi32>", asm["ttir"])
    assert dim == 1 or ("ld.global.v4.b32" in asm["ptx"] and "st.global.v4.b32" in asm["ptx"])


@pytest.mark.parametrize("logits", ["*bf16", "*fp32"])
def test_cross_entropy_compiles_and_moves_16_bytes_at_a_time(logits: str) -> None:
    from titan_moe.ops import cross_entropy_triton as kernels

    constants = {"WIDTH": 151_936, "IGNORED": -100, "BLOCK": 4096, "WIDE": 0}
    for name, numbers in {
        "_cross_entropy_kernel": ["losses_ptr"],
        "_statistics_kernel": ["largest_ptr", "sum_ptr", "target_ptr"],
        "_gradient_kernel": ["lse_ptr"],
    }.items():
        pointers = {"logits_ptr": logits, "labels_ptr": "*i64"} | dict.fromkeys(numbers, "*fp32")
        kernel = getattr(kernels, name)
        first = [] if name == "_cross_entropy_kernel" else ["first"]
        asm = compiled(kernel, pointers, first, kernels._WARPS, **constants)
        assert "ld.global.v4.b32" in asm["ptx"], name
        assert "st.global.v4.b32" in asm["ptx"] or name == "_statistics_kernel"


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dim", [2, 768, 2880])
def test_gated_rows_compile_and_move_16_bytes_at_a_time(dim: int, activation: str) -> None:
    from titan_moe.ops import gated_triton as kernels

    gate_RF = torch.empty(1, dim, dtype=torch.bfloat16, device="meta")
    constants = kernels._constants(gate_RF, gate_RF, ACTIVATIONS[activation])
    pointers = dict.fromkeys(["gate_ptr", "up_ptr", "hidden_ptr"], "*bf16")
    pointers |= {"weights_ptr": "*fp32"}
    asm = compiled(kernels._gated_rows_kernel, pointers, ["num_rows"], **constants)
    assert dim == 2 or ("ld.global.v4.b32" in asm["ptx"] and "st.global.v4.b32" in asm["ptx"])

    pointers = {"grad_ptr": "*bf16", **pointers, "grad_gate_ptr": "*bf16", "grad_up_ptr": "*bf16"}
    pointers |= {"grad_weights_ptr": "*fp32"}
    del pointers["hidden_ptr"]
    asm = compiled(kernels._gated_rows_backward_kernel, pointers, ["num_rows"], **constants)
    assert dim == 2 or ("ld.global.v4.b32" in asm["ptx"] and "st.global.v4.b32" in asm["ptx"])


@pytest.mark.parametrize(
    ("top_k", "num_keys", "once"),
    [(8, 128, 0), (6, 512, 0), (1, 16, 0), (8, 2, 1), (8, 8, 1), (6, 64, 1), (10, 64, 1)],
)
def test_sorts_compile(top_k: int, num_keys: int, once: int) -> None:
    from titan_moe.ops import sort_rows_triton as kernels

    experts_TK = torch.empty(1, top_k, dtype=torch.int64, device="meta")
    constants = kernels.sizes(experts_TK, num_keys, DIVISOR=1 + once, ONCE=once)
    pointers = {"experts_ptr": "*i64", "counts_ptr": "*i32"}
    assert compiled(kernels._count_kernel, pointers, ["num_tokens"], **constants)["cubin"]

    slots = "*i32" if once else "*i64"
    pointers |= {"source_ptr": "*i64", "slots_ptr": slots, "rows_ptr": "*i64", "totals_ptr": "*i64"}
    constants |= {"NUM_KEYS": num_keys, "MOST": min(top_k, num_keys), "PROGRAMS": 4096 // num_keys}
    numbers = ["num_tokens", "num_programs"]
    assert compiled(kernels._order_kernel, pointers, numbers, **constants)["cubin"]


@pytest.mark.parametrize("halves", [0, 1])
@pytest.mark.parametrize("first, dim", [(0, 64), (0, 128), (128, 192)])
def test_rotations_compile_and_move_16_bytes_at_a_time(halves: int, first: int, dim: int) -> None:
    from titan_moe.ops.rotate_triton import _rotate_kernel

    constants = {"HEADS": 16, "DIM": dim, "FIRST": first, "PAIRS": 32}
    constants |= {"HALVES": halves, "ROWS": 64, "COLUMNS": 32}
    pointers = {"x_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "out_ptr": "*bf16"}
    numbers = ["num_rows", "seq_len", "batch_stride", "token_stride", "head_stride"]
    for backward in (0, 1):
        asm = compiled(_rotate_kernel, pointers, numbers, **constants, BACKWARD=backward)
        assert "ld.global.v4.b32" in asm["ptx"] and "st.global.v4.b32" in asm["ptx"]
        assert not re.search(r"(ld|st)\.global\.b16", asm["ptx"])
