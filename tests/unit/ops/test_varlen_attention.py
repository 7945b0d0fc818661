"""Where pieces begin, what torch's kernel is asked for, and gradients with sinks."""

from itertools import product

import pytest
import torch
from torch import Tensor

from titan_moe.ops import varlen_attention as varlen
from titan_moe.ops.attention import CausalSdpa, FlexCore, VarlenCore, choose_core
from titan_moe.ops.local_attention import LocalAttention
from titan_moe.ops.varlen_attention import (
    DocumentBounds,
    Pieces,
    bounds_of,
    pieces_of_rows,
    reference_backward,
    reference_forward,
    takes,
    varlen_attention,
)

DOCUMENTS_BS = torch.tensor([[0] * 6 + [1] + [2] * 6, [0] * 13, [7] * 2 + [3] * 11]).int()
SIZES = [1, 2, 5, 12, 13, 100]


def slow_starts(local: LocalAttention | None) -> list[int]:
    """Token by token, in the stream of all rows."""
    starts = []
    for row, documents in enumerate(DOCUMENTS_BS.tolist()):
        for at, document in enumerate(documents):
            opens = at == 0 or document != documents[at - 1]
            chunk = local is not None and local.kind == "chunk" and at % local.size == 0
            if opens or chunk:
                starts.append(row * len(documents) + at)
    return starts


def test_bounds_of_documents() -> None:
    assert bounds_of(DOCUMENTS_BS) == (3, 13)
    assert bounds_of(DOCUMENTS_BS[:1]) == (3, 6)
    assert bounds_of(DOCUMENTS_BS[:, :1]) == (1, 1)


@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("kind", [None, "window", "chunk"])
def test_pieces_begin_where_documents_and_chunks_do(kind: str | None, spare: int) -> None:
    per_row, longest = bounds_of(DOCUMENTS_BS)
    for size in SIZES:
        local = None if kind is None else LocalAttention(kind, size, global_every=0)
        bounds = DocumentBounds(per_row + spare, longest)
        pieces = pieces_of_rows(DOCUMENTS_BS, local, bounds)
        chunks = 12 // size if kind == "chunk" else 0
        assert pieces.starts_N1.dtype == torch.int32
        assert len(pieces.starts_N1) == 3 * (per_row + spare + chunks) + 1
        lengths = pieces.starts_N1.diff()
        assert (lengths >= 0).all() and lengths.max() <= pieces.longest <= 13
        filled = pieces.starts_N1[:-1][lengths > 0].tolist()
        assert filled == slow_starts(local)
        assert pieces.starts_N1[-1] == DOCUMENTS_BS.numel()
        assert pieces.window == (size if kind == "window" else None)


def test_what_the_kernel_takes() -> None:
    assert takes(128, 128, torch.bfloat16) and takes(192, 128, torch.float16)
    refused = [
        (128, 128, torch.float32),
        (264, 264, torch.bfloat16),
        (12, 12, torch.bfloat16),
        (64, 128, torch.bfloat16),
    ]
    assert not any(takes(*case) for case in refused)


def test_documents_on_a_gpu_go_to_flash_where_it_takes_them() -> None:
    chosen = choose_core(mask_documents=True, device_type="cuda", takes_varlen=True)
    assert isinstance(chosen, VarlenCore)
    for mask_documents in (False, True):
        refused = choose_core(
            mask_documents=mask_documents, device_type="cuda", local_or_sinks=True
        )
        assert isinstance(refused, FlexCore)
    chosen = choose_core(mask_documents=False, device_type="cuda", takes_varlen=True)
    assert isinstance(chosen, CausalSdpa)


def test_torch_names_the_kernels_arguments_as_ever() -> None:
    """Private: what changes here is to be followed in varlen_attention.py."""
    forward, backward = (
        [argument.name for argument in operation.default._schema.arguments]
        for operation in (
            torch.ops.aten._flash_attention_forward,
            torch.ops.aten._flash_attention_backward,
        )
    )
    places = ["cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
    reach = ["scale", "window_size_left", "window_size_right"]
    assert forward[:13] == ["query", "key", "value", *places, "return_debug_mask", *reach]
    tensors = ["grad_out", "query", "key", "value", "out", "logsumexp"]
    assert backward[:17] == [*tensors, *places, "rng_state", "unused", *reach]


class Kernel:
    """torch's kernel as its own checks describe it, by the reference."""

    def pieces(self, starts, other_starts, longest, other_longest, dropout, causal, left, right):
        assert starts is other_starts and longest == other_longest and dropout == 0.0
        assert starts.dtype == torch.int32 and starts.diff().max() <= longest
        # Causal, or no key beyond the query; without a window no limit before it.
        assert right == 0 and causal == (left < 0)
        return Pieces(starts, longest, None if left < 0 else left + 1)

    def check(self, *tensors: Tensor) -> None:
        assert len({x.shape[-1] for x in tensors}) == 1 and tensors[0].shape[-1] % 8 == 0
        assert all(x.stride(-1) == 1 for x in tensors)

    def forward(
        self, q, k, v, *places, scale, window_size_left: int, window_size_right: int
    ) -> tuple[Tensor, ...]:
        *places, debug = places
        assert not debug
        self.check(q, k, v)
        pieces = self.pieces(*places, window_size_left, window_size_right)
        return (*reference_forward(q, k, v, pieces, scale), q.new_empty(2), q.new_empty(0), q)

    def backward(
        self, grad, q, k, v, o, lse, *rest, scale, window_size_left: int, window_size_right: int
    ) -> tuple[Tensor, ...]:
        *places, state, _ = rest
        assert state.dtype == torch.uint64 and len(state) == 2
        self.check(grad, q, k, v, o)
        pieces = self.pieces(*places, window_size_left, window_size_right)
        return reference_backward(grad, q, k, v, o, lse, pieces, scale)


@pytest.mark.parametrize("v_dim", [16, 8])
@pytest.mark.parametrize("kind", [None, "window", "chunk"])
def test_torchs_kernel_is_asked_for_what_the_reference_computes(
    kind: str | None, v_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = None if kind is None else LocalAttention(kind, 4, global_every=0)
    pieces = pieces_of_rows(DOCUMENTS_BS, local, bounds_of(DOCUMENTS_BS))
    generator = torch.Generator().manual_seed(0)
    shapes = (39, 4, 16), (39, 2, 16), (39, 2, v_dim), (4,)
    inputs = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]

    def results() -> list[Tensor]:
        o_THC = varlen_attention(*inputs[:3], pieces, 0.3, inputs[3])
        assert o_THC.shape == (39, 4, v_dim) and o_THC.is_contiguous()
        return [o_THC, *torch.autograd.grad(o_THC.square().sum(), inputs)]

    oracle = results()
    monkeypatch.setattr(varlen, "reference_forward", varlen.flash_forward)
    monkeypatch.setattr(varlen, "reference_backward", varlen.flash_backward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", Kernel().forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", Kernel().backward)
    for ours, wanted in zip(results(), oracle, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("sinks", [False, True])
def test_low_precision_rounds_results_alone(sinks: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    core = VarlenCore(mask_documents=True)
    shapes = [(3, 4, 13, 16), (3, 2, 13, 16), (3, 2, 13, 16), (4,)][: 3 + sinks]
    exact = [torch.randn(s, generator=generator).bfloat16().double() for s in shapes]

    def results(tensors: list[Tensor]) -> list[Tensor]:
        q, k, v, *rest = inputs = [x.detach().requires_grad_() for x in tensors]
        out = core(q, k, v, core.mask(DOCUMENTS_BS), 0.3, *rest)
        return [out, *torch.autograd.grad(out.sum(), inputs)]

    for ours, wanted in zip(results([x.bfloat16() for x in exact]), results(exact), strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - wanted).norm() <= 8e-3 * wanted.norm()


def test_a_compiled_layer_is_not_compiled_for_every_number_of_documents() -> None:
    core = VarlenCore(mask_documents=True)
    attend = torch.compile(core.__call__, backend="aot_eager", fullgraph=True)
    q, k, v = (torch.randn(2, heads, 32, 8, requires_grad=True) for heads in (4, 2, 2))
    cuts = [(9,), (5, 20), (7, 9, 11), (3, 17, 19, 25), (1, 2, 3, 4, 5), ()]
    for number, (first, second) in enumerate(product(cuts, cuts)):
        at_S = torch.arange(32)
        documents_BS = torch.stack([sum((at_S >= c for c in x), at_S * 0) for x in (first, second)])
        mask = core.mask(documents_BS)
        with torch.compiler.set_stance("default" if number < 20 else "fail_on_recompile"):
            ours = attend(q, k, v, mask, 0.3)
        torch.testing.assert_close(ours, core(q, k, v, mask, 0.3))
