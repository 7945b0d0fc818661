"""The attention variants: GQA, and MLA, which may be sparse. `build_attention` picks by the type of
the dimensions."""

from collections.abc import Callable
from functools import partial, singledispatch
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.models.config import (
    AttentionConfig,
    GQAConfig,
    MLAConfig,
    ModelConfig,
    PositionTemperature,
)
from titan_moe.models.indexer import Indexer, SharedSelection
from titan_moe.models.output import norm_of
from titan_moe.models.rope import Rotation, rotate, softmax_factor
from titan_moe.ops import flex_attention, varlen_attention
from titan_moe.ops.attention import LOAD_BYTES, AttentionCore, choose_core
from titan_moe.ops.sparse_attention import SparseAttention


class Attention(nn.Module):
    """The base of all variants, with `forward(x_BSD, rotation, mask, counted_BS)`. An indexer's
    loss leaves out queries that do not count, as `MoE.forward` says. The strategy `core` is an
    AttentionCore that the model's layout may set; `attend(core, ...)` calls it between the
    projections."""

    core: Callable[..., Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.attend = Attend()


class Attend(nn.Module):
    """Calls a core. A module, so that hooks see what the core is given and what it returns."""

    def forward(
        self, core: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *args: Any
    ) -> Tensor:
        return core(q, k, v, *args)


@singledispatch
def build_attention(
    attention: AttentionConfig, config: ModelConfig, layer: int, core: AttentionCore
) -> Attention:
    """The attention of one layer. TypeError for dimensions that no variant has registered."""
    raise TypeError(f"models/attention.py builds no attention from a {type(attention).__name__}")


@build_attention.register(GQAConfig)
class GQA(Attention):
    """Grouped-query attention (arXiv 2305.13245).

    Queries in `num_heads` heads, keys and values in `num_kv_heads`; q and k may be normed. Where
    positions do not rotate a layer's queries and keys, `temperature` may scale queries.
    """

    def __init__(
        self, attention: GQAConfig, config: ModelConfig, layer: int, core: AttentionCore
    ) -> None:
        super().__init__()
        self.config, self.core = attention, core
        self.pairing, self.rotary = config.rope.pairing, config.rotates(layer)
        self.norm_eps, self.head_dim = config.norm_eps, attention.head_dim
        self.scale = self.head_dim**-0.5 * softmax_factor(config.rope)
        dim, bias = config.dim, attention.bias
        heads, keys = (n * self.head_dim for n in (attention.num_heads, attention.num_kv_heads))
        self.wq = nn.Linear(dim, heads * (1 + attention.output_gate), bias=bias)
        self.wk = nn.Linear(dim, keys, bias=bias)
        self.wv = nn.Linear(dim, keys, bias=bias)
        self.wo = nn.Linear(heads, dim, bias=bias and attention.output_bias)
        # Norms of whole projections, over all heads; norms of each head.
        self.wq_norm: nn.Module = nn.Identity()
        self.wk_norm: nn.Module = nn.Identity()
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if attention.qk_norm == "across_heads":
            self.wq_norm = nn.RMSNorm(self.wq.out_features, eps=config.norm_eps)
            self.wk_norm = nn.RMSNorm(self.wk.out_features, eps=config.norm_eps)
        elif attention.qk_norm == "learned":
            self.q_norm = norm_of(config)(self.head_dim)
            self.k_norm = norm_of(config)(self.head_dim)
        self.sinks = PerHead(attention.num_heads) if attention.sinks else None

    def forward(
        self, x_BSD: Tensor, rotation: Rotation, mask: Any, counted_BS: Tensor | None = None
    ) -> Tensor:
        heads = (-1, self.head_dim)
        q, k, v = self.wq(x_BSD), self.wk(x_BSD), self.wv(x_BSD)
        if self.config.output_gate:  # Each head's channels lie beside their gates.
            q, gate = (x.flatten(2) for x in q.unflatten(-1, (-1, 2, self.head_dim)).unbind(-2))
        q_BSHC = self.q_norm(self.wq_norm(q).unflatten(-1, heads))
        k_BSHC = self.k_norm(self.wk_norm(k).unflatten(-1, heads))
        v_BSHC = v.unflatten(-1, heads)
        q_BSHC, k_BSHC = self.place(q_BSHC, k_BSHC, rotation)
        q_BHSC, k_BHSC, v_BHSC = (x.transpose(1, 2) for x in (q_BSHC, k_BSHC, v_BSHC))
        sinks_H = None if self.sinks is None else self.sinks()
        o_BHSC = self.attend(self.core, q_BHSC, k_BHSC, v_BHSC, mask, self.scale, sinks_H)
        o_BSD = o_BHSC.transpose(1, 2).flatten(2)
        return self.wo(o_BSD * gate.sigmoid() if self.config.output_gate else o_BSD)

    def place(self, q_BSHC: Tensor, k_BSHC: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Gives queries and keys their positions in the sequence."""
        if not self.rotary:
            if self.config.temperature is not None:
                q_BSHC = _tempered(q_BSHC, rotation, self.config.temperature)
            return q_BSHC, k_BSHC
        q_BSHC, k_BSHC = (rotate(x_BSHC, rotation, self.pairing) for x_BSHC in (q_BSHC, k_BSHC))
        if self.config.qk_norm != "unweighted":
            return q_BSHC, k_BSHC
        norm = partial(F.rms_norm, normalized_shape=(self.head_dim,), eps=self.norm_eps)
        return norm(q_BSHC), norm(k_BSHC)


class PerHead(nn.Module):
    """Holds numbers of each head, such as its sink, a logit that joins each of its softmaxes. Dim 0
    of `weight` counts heads or their channels.

    It is a module, so that tensor parallelism can hand over a rank's heads.
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self) -> Tensor:
        return self.weight


@build_attention.register(MLAConfig)
class MLA(Attention):
    """Multi-head latent attention (arXiv 2405.04434, section 2.1).

    Keys and values from a low-rank latent; all heads share the rotated part of the key. With an
    indexer, `core` also takes its `Index` or `SharedKeys` (ops/sparse_attention.py).
    """

    def __init__(
        self, attention: MLAConfig, config: ModelConfig, layer: int, core: AttentionCore
    ) -> None:
        super().__init__()
        self.config, self.core, self.pairing = attention, core, config.rope.pairing
        dim, qk_dim = config.dim, attention.qk_dim
        self.scale = qk_dim**-0.5 * softmax_factor(config.rope)
        if attention.q_rank is None:
            self.wq = nn.Linear(dim, attention.num_heads * qk_dim, bias=False)
        else:
            self.wq_a = nn.Linear(dim, attention.q_rank, bias=attention.bias)
            self.q_norm = nn.RMSNorm(attention.q_rank, eps=attention.norm_eps)
            self.wq_b = nn.Linear(attention.q_rank, attention.num_heads * qk_dim, bias=False)
        self.wkv_a = nn.Linear(dim, attention.kv_rank + attention.rope_dim, bias=attention.bias)
        self.kv_norm = nn.RMSNorm(attention.kv_rank, eps=attention.norm_eps)
        kv_dim = attention.num_heads * (attention.nope_dim + attention.v_dim)
        self.wkv_b = nn.Linear(attention.kv_rank, kv_dim, bias=False)
        self.wo = nn.Linear(attention.num_heads * attention.v_dim, dim, bias=attention.bias)
        self.indexer: Indexer | SharedSelection | None = None
        if attention.indexer is not None:
            assert attention.q_rank is not None, "an indexer reads the query's latent"
            self.indexer = Indexer(dim, attention.q_rank, attention.indexer)
            if attention.indexer.shares:
                self.indexer = SharedSelection(attention.indexer)

    def forward(
        self, x_BSD: Tensor, rotation: Rotation, mask: Any, counted_BS: Tensor | None = None
    ) -> Tensor:
        config = self.config
        whole_rank = config.q_rank is None
        q, latent = (self.wq if whole_rank else self.wq_a)(x_BSD), self.wkv_a(x_BSD)
        q_latent = q if whole_rank else self.q_norm(q)
        q = q if whole_rank else self.wq_b(q_latent)
        q_BSHC = q.unflatten(-1, (-1, config.qk_dim))
        if config.rotary:
            q_BSHC = rotate(q_BSHC, rotation, self.pairing, first=config.nope_dim)

        latent_BSR, k_rope = latent.split([config.kv_rank, config.rope_dim], dim=-1)
        kv_BSHC = self.wkv_b(self.kv_norm(latent_BSR))
        kv_BSHC = kv_BSHC.unflatten(-1, (-1, config.nope_dim + config.v_dim))
        k_nope, v_BSHC = kv_BSHC.split([config.nope_dim, config.v_dim], dim=-1)
        if config.nope_dim * v_BSHC.element_size() % LOAD_BYTES:
            v_BSHC = v_BSHC.contiguous()  # Its rows begin between the loads of fused kernels.
        k_rope = k_rope[:, :, None]
        if config.rotary:
            k_rope = rotate(k_rope, rotation, self.pairing)
        k_BSHC = torch.cat([k_nope, k_rope.expand(-1, -1, k_nope.shape[2], -1)], dim=-1)

        q_BHSC, k_BHSC, v_BHSC = (x.transpose(1, 2) for x in (q_BSHC, k_BSHC, v_BSHC))
        index: tuple[Any, ...] = ()
        if self.indexer is not None:
            index = None, self.indexer(x_BSD, q_latent, rotation, counted_BS)
        o_BHSC = self.attend(self.core, q_BHSC, k_BHSC, v_BHSC, mask, self.scale, *index)
        return self.wo(o_BHSC.transpose(1, 2).flatten(2))


def _tempered(q_BSHC: Tensor, rotation: Rotation, temperature: PositionTemperature) -> Tensor:
    dtype = rotation.cos_BSC.dtype
    steps_BS = ((rotation.positions_BS + 1) // temperature.floor).to(dtype)
    scale_BS = 1 + temperature.scale * steps_BS.log1p()
    return (q_BSHC.to(dtype) * scale_BS[..., None, None]).to(q_BSHC.dtype)


def plain_core(
    config: ModelConfig,
    *,
    mask_documents: bool = False,
    dtype: torch.dtype = torch.float32,
    device_type: str = "cpu",
) -> AttentionCore:
    """The fastest core for a model that computes in `dtype`, with whole sequences on one device."""
    if config.indexer is not None:
        return SparseAttention(mask_documents=mask_documents)
    heads = config.attention
    return choose_core(
        mask_documents=mask_documents,
        local_or_sinks=config.local is not None or heads.sinks,
        takes_varlen=device_type == "cuda"
        and varlen_attention.takes(heads.qk_dim, heads.v_dim, dtype)
        and not heads.sinks,
        takes_flex=takes_flex(config, dtype, device_type),
    )


def takes_flex(config: ModelConfig, dtype: torch.dtype, device_type: str) -> bool:
    """Returns whether a type of device has compiled flex attention for the model's heads."""
    heads = config.attention
    return device_type == "cuda" and flex_attention.takes(heads.qk_dim, heads.v_dim, dtype)
