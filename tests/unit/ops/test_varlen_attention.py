"""Starts of pieces, and the cores of a GPU."""

import pytest
import torch

from titan_moe.ops.attention import FlexCore, Sdpa, VarlenCore, choose_core
from titan_moe.ops.local_attention import LocalAttention
from titan_moe.ops.varlen_attention import DocumentBounds, bounds_of, pieces_of_rows

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


def test_documents_on_a_gpu_go_to_flash_where_it_takes_them() -> None:
    chosen = choose_core(mask_documents=True, device_type="cuda", takes_varlen=True)
    assert isinstance(chosen, VarlenCore)
    for mask_documents in (False, True):
        refused = choose_core(
            mask_documents=mask_documents, device_type="cuda", local_or_sinks=True
        )
        assert isinstance(refused, FlexCore)
    chosen = choose_core(mask_documents=False, device_type="cuda", takes_varlen=True)
    assert isinstance(chosen, Sdpa)
