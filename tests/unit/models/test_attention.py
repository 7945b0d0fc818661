"""Attention cores and layers against slow loops and against documents one by one."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from tests.support.packing import filled, train_packed_and_alone
from tests.support.visible import visible
from titan_moe.models.config import GQAConfig, MLAConfig, ModelConfig, RopeConfig
from titan_moe.models.decoder import Decoder, initial_std
from titan_moe.models.registry import model_config
from titan_moe.ops.attention import FlexCore, Sdpa, VarlenCore
from titan_moe.ops.local_attention import LocalAttention


def slow_varlen_attn(
    q_THC: Tensor,
    k_THC: Tensor,
    v_THC: Tensor,
    *places: Any,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """Computes `torch.nn.attention.varlen.varlen_attn` in any type; checks its arguments."""
    starts_N1, key_starts_N1, longest, longest_keys = places
    assert starts_N1 is key_starts_N1 and longest == longest_keys and window_size[1] == 0
    assert starts_N1.dtype is torch.int32 and starts_N1.diff().max() <= longest
    assert q_THC.shape[2] == k_THC.shape[2] == v_THC.shape[2]
    group = q_THC.shape[1] // k_THC.shape[1]
    assert enable_gqa == (group > 1)
    piece_T = torch.bucketize(torch.arange(len(q_THC)), starts_N1, right=True)
    window = LocalAttention("window", window_size[0] + 1)
    (seen_TT,) = visible(piece_T[None], window if window_size[0] >= 0 else None)
    q, k, v = (x.transpose(0, 1) for x in (q_THC, k_THC, v_THC))
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    weights = (q @ k.mT * scale).masked_fill(~seen_TT, float("-inf")).softmax(-1)
    return (weights @ v).transpose(0, 1)


DOCUMENTS_BS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 1]], dtype=torch.int32)


LOCALS = {
    "all": None,
    "window": LocalAttention("window", 3),
    "window of one": LocalAttention("window", 1),
    "window beyond the row": LocalAttention("window", 99),
    "chunk": LocalAttention("chunk", 3),
}


def slow_attention(q, k, v, documents_BS, local, scale, sinks):
    """Query by query, head by head."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    groups, seen_BSS = q.shape[1] // k.shape[1], visible(documents_BS, local)
    for b, h, i in product(*map(range, q.shape[:3])):
        seen = seen_BSS[b, i].nonzero()[:, 0].tolist()
        scores = [q[b, h, i] @ k[b, h // groups, j] * scale for j in seen]
        if sinks is not None:
            scores.append(sinks[h])
        weights = torch.stack(scores).softmax(0)[: len(seen)]
        out[b, h, i] = sum(w * v[b, h // groups, j] for w, j in zip(weights, seen, strict=True))
    return out


def _inputs(*, sinks: bool, shape: str = "gqa", dtype=torch.float64) -> list[torch.Tensor]:
    """q, k, v and perhaps sinks."""
    generator = torch.Generator().manual_seed(0)
    kv_heads, qk_dim, v_dim = {"gqa": (2, 16, 16), "mla": (4, 12, 8)}[shape]
    sizes = [(2, 4, 8, qk_dim), (2, kv_heads, 8, qk_dim), (2, kv_heads, 8, v_dim), (4,)]
    tensors = [torch.randn(size, dtype=dtype, generator=generator) for size in sizes]
    return [x.requires_grad_() for x in tensors[: 3 + sinks]]


def _with_gradients(out: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [out, *torch.autograd.grad((out * torch.arange(8.0)[:, None]).sum(), inputs)]


def _attend(core, inputs: list[torch.Tensor], documents_BS, local) -> torch.Tensor:
    return core(*inputs[:3], core.mask(documents_BS, local), 0.3, *inputs[3:])


def _assert_close(ours, oracle, bound: float) -> None:
    for a, b in zip(ours, oracle, strict=True):
        torch.testing.assert_close(a, b, rtol=bound, atol=bound)


@pytest.mark.parametrize("kind", ["sdpa", "varlen"])
@pytest.mark.parametrize("shape", ["gqa", "mla"])
@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("masked", [True, False])
def test_attention_cores_equal_a_slow_loop(
    masked: bool, local: str, sinks: bool, shape: str, kind: str, monkeypatch: pytest.MonkeyPatch
):
    inputs = _inputs(sinks=sinks, shape=shape)
    core = Sdpa(mask_documents=masked)
    if kind == "varlen":
        if sinks:
            pytest.skip("torch's kernel has no sinks")
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", slow_varlen_attn)
        core = VarlenCore(mask_documents=masked)
    documents = DOCUMENTS_BS if masked else torch.zeros_like(DOCUMENTS_BS)
    q, k, v, *rest = inputs
    slow = slow_attention(q, k, v, documents, LOCALS[local], 0.3, rest[0] if sinks else None)
    ours = _attend(core, inputs, DOCUMENTS_BS, LOCALS[local])
    _assert_close(_with_gradients(ours, inputs), _with_gradients(slow, inputs), 1e-13)


@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("local", ["all", "window", "chunk"])
@pytest.mark.parametrize("masked", [True, False])
def test_flex_matches_the_explicit_mask_with_gradients(
    masked: bool, local: str, sinks: bool, monkeypatch: pytest.MonkeyPatch
):
    """Torch refuses flex attention's backward on a CPU, but can do it, in float64 too."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    inputs = _inputs(sinks=sinks)
    plain = Sdpa(mask_documents=masked)
    found = [
        _with_gradients(_attend(core, inputs, DOCUMENTS_BS, LOCALS[local]), inputs)
        for core in (plain, FlexCore(mask_documents=masked, compiled=False))
    ]
    _assert_close(*found, 1e-13)


@pytest.mark.parametrize("core", ["plain", "flex"])
def test_a_mask_without_documents_is_made_once_for_each_length(core: str):
    made = Sdpa() if core == "plain" else FlexCore(mask_documents=False, compiled=False)
    window, chunk = LOCALS["window"], LOCALS["chunk"]
    first = made.mask(DOCUMENTS_BS, window)
    assert made.mask(torch.zeros_like(DOCUMENTS_BS)[:1], window) is first
    assert made.mask(DOCUMENTS_BS, chunk) is not first
    shorter = made.mask(DOCUMENTS_BS[:, :5], window)
    assert shorter is not first and tuple(shorter.shape[-2:]) == (5, 5)
    by_documents = FlexCore(mask_documents=True, compiled=False)
    assert by_documents.mask(DOCUMENTS_BS, window) is not by_documents.mask(DOCUMENTS_BS, window)


def test_sinks_of_the_plain_core_need_no_mask():
    """The plain core takes sinks that were not announced; without sinks it needs no mask."""
    inputs = _inputs(sinks=True)
    assert Sdpa().mask(DOCUMENTS_BS) is None
    ours = _attend(Sdpa(), inputs, DOCUMENTS_BS, None)
    whole = _attend(Sdpa(), inputs, DOCUMENTS_BS, LOCALS["window beyond the row"])
    assert torch.equal(ours, whole)


GQA = GQAConfig(4, 2, 8, RopeConfig(100.0), qk_norm="learned")
MLA = MLAConfig(2, 12, 8, 8, 4, 6, RopeConfig(100.0))


def _config(attention: GQAConfig | MLAConfig) -> ModelConfig:
    return ModelConfig(
        vocab_size=32, dim=16, num_layers=2, attention=attention, hidden_dim=32, moe=None
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nope_dim", [2, 4, 8, 12])
def test_rows_of_heads_begin_where_fused_kernels_can_load(nope_dim: int, dtype: torch.dtype):
    """Values of latent attention lie beside the keys' channels."""
    seen = []

    class Seeing(Sdpa):
        def __call__(self, q_BHSC, k_BHSC, v_BHSC, *rest):
            seen.extend([q_BHSC, k_BHSC, v_BHSC])
            return v_BHSC

    heads = replace(MLA, nope_dim=nope_dim, v_dim=16)
    Decoder(_config(heads), Seeing()).to(dtype)(torch.zeros(2, 8, dtype=torch.int64))
    for x in seen:
        places = [x.storage_offset(), *x.stride()[:-1]]
        whole = x.shape[-1] * x.element_size() % 16 == 0
        assert not whole or all(place * x.element_size() % 16 == 0 for place in places)


@pytest.mark.parametrize("attention", [GQA, MLA])
def test_packed_documents_are_trained_as_one_by_one(attention):
    config = replace(_config(attention), init_std=0.3)
    packed, alone = filled(config, Sdpa(mask_documents=True)), filled(config, Sdpa())
    train_packed_and_alone(packed, alone, (3, 2, 7, 1))


def test_initial_std_follows_from_the_parameters_name():
    config = replace(model_config("qwen3", "gate"), num_layers=8, init_std=0.02)
    assert initial_std("layers.0.attention_norm.weight", config) is None
    assert initial_std("layers.0.attention.q_norm.weight", config) is None
    assert initial_std("norm.weight", config) is None
    assert initial_std("layers.0.moe.experts.w2", config) == 0.02 / 4
    assert initial_std("layers.0.attention.wo.weight", config) == 0.02 / 4
    assert initial_std("output.weight", config) == 0.02
