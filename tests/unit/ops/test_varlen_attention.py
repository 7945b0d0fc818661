"""Starts of pieces, and the cores of a GPU."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from titan_moe.config.job_config import ActivationCheckpoint, Compile
from titan_moe.distributed.compile import apply_compile
from titan_moe.models.attention import plain_core, takes_flex
from titan_moe.models.config import GQAConfig, MLAConfig, RopeConfig
from titan_moe.models.decoder import Decoder
from titan_moe.models.registry import model_config
from titan_moe.ops.attention import FlexCore, Sdpa, VarlenCore
from titan_moe.ops.local_attention import LocalAttention
from titan_moe.ops.varlen_attention import DocumentBounds, bounds_of, pieces_of_sequences

DOCUMENTS_BS = torch.tensor([[0] * 6 + [1] + [2] * 6, [0] * 13, [7] * 2 + [3] * 11]).int()
SIZES = [1, 2, 5, 12, 13, 100]


def slow_starts(local: LocalAttention | None) -> list[int]:
    """Token by token, in the stream of all rows."""
    starts = []
    for row, documents in enumerate(DOCUMENTS_BS.tolist()):
        for at, document in enumerate(documents):
            if at == 0 or document != documents[at - 1]:
                opens = at
            size = local.size if local is not None and local.kind == "chunk" else len(documents)
            if (at - opens) % size == 0:
                starts.append(row * len(documents) + at)
    return starts


def test_bounds_hold_the_most_documents_and_the_longest() -> None:
    assert bounds_of(DOCUMENTS_BS) == (3, 13)
    assert bounds_of(DOCUMENTS_BS[:1]) == (3, 6)
    assert bounds_of(DOCUMENTS_BS[:, :1]) == (1, 1)


@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("kind", [None, "window", "chunk"])
def test_pieces_begin_where_documents_and_chunks_do(kind: str | None, spare: int) -> None:
    per_sequence, longest = bounds_of(DOCUMENTS_BS)
    for size in SIZES:
        local = None if kind is None else LocalAttention(kind, size)
        bounds = DocumentBounds(per_sequence + spare, longest)
        pieces = pieces_of_sequences(DOCUMENTS_BS, local, bounds)
        chunks = 12 // size if kind == "chunk" else 0
        assert pieces.starts_N1.dtype == torch.int32
        assert len(pieces.starts_N1) == 3 * (per_sequence + spare + chunks) + 1
        lengths = pieces.starts_N1.diff()
        assert (lengths >= 0).all() and lengths.max() <= len(pieces.longest_L) <= 13
        filled = pieces.starts_N1[:-1][lengths > 0].tolist()
        assert filled == slow_starts(local)
        assert pieces.starts_N1[-1] == DOCUMENTS_BS.numel()
        assert pieces.window == (size if kind == "window" else None)


@pytest.mark.parametrize("local", [None, LocalAttention("chunk", 24)], ids=str)
def test_layers_are_not_compiled_again_for_other_documents(local: LocalAttention | None) -> None:
    """On fake tensors: the CPU has no kernel of torch's operation, and no graph looks into it."""
    torch._dynamo.reset()
    counters.clear()
    config = replace(model_config("qwen3", "gate"), num_layers=1, moe=None)
    config = replace(config, attention=replace(config.attention, local=local))
    per_sequence, longest = [1, 1, 2, 5, 5, 64, 9, 3, 7, 1], [64, 1, 40, 40, 13, 1, 64, 24, 50, 2]
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = Decoder(config, VarlenCore(mask_documents=True))
        section, recompute = Compile(enable=True, backend="aot_eager"), ActivationCheckpoint()
        apply_compile(model.layers.values(), section, recompute)
        tokens_BS = torch.zeros(2, 64, dtype=torch.int64)
        for each in zip(per_sequence, longest, strict=True):
            model(tokens_BS, tokens_BS, bounds=DocumentBounds(*each)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1


HEADS = GQAConfig(4, 2, 32, RopeConfig(100.0))
LATENT = MLAConfig(4, None, kv_rank=8, nope_dim=8, rope_dim=4, v_dim=8, rope=HEADS.rope)


@pytest.mark.parametrize(
    ("heads", "dtype", "core"),
    [
        (HEADS, torch.bfloat16, VarlenCore),
        (replace(HEADS, sinks=True), torch.bfloat16, FlexCore),
        (HEADS, torch.float32, FlexCore),
        (replace(HEADS, head_dim=16), torch.float32, FlexCore),
        (replace(HEADS, head_dim=20), torch.bfloat16, FlexCore),
        (replace(HEADS, head_dim=264), torch.bfloat16, FlexCore),
        # Neither kernel takes these heads or this type.
        (HEADS, torch.float64, Sdpa),
        (replace(HEADS, head_dim=8), torch.float32, Sdpa),
        (replace(HEADS, head_dim=8, sinks=True), torch.bfloat16, Sdpa),
        (LATENT, torch.bfloat16, Sdpa),
        (replace(LATENT, nope_dim=16), torch.float32, Sdpa),
    ],
    ids=str,
)
def test_masks_on_a_gpu_go_to_the_fastest_kernel_that_takes_the_heads(
    heads: GQAConfig | MLAConfig, dtype: torch.dtype, core: type
) -> None:
    config = replace(model_config("qwen3", "gate"), attention=heads)
    on_gpu = partial(plain_core, config, dtype=dtype, device_type="cuda")
    assert isinstance(on_gpu(mask_documents=True), core)
    assert isinstance(on_gpu(mask_documents=False), core if heads.sinks else Sdpa)
    assert isinstance(plain_core(config, mask_documents=True, dtype=dtype), Sdpa)
    assert takes_flex(config, dtype, "cuda") == (core is not Sdpa)
    assert not takes_flex(config, dtype, "cpu")
