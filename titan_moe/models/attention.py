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
    CompressedConfig,
    GQAConfig,
    MLAConfig,
    ModelConfig,
    PositionTemperature,
)
from titan_moe.models.indexer import Indexer, SharedSelection
from titan_moe.models.output import norm_of
from titan_moe.models.rope import Rotation, rotate, softmax_factor
from titan_moe.ops import flex_attention, varlen_attention
from titan_moe.ops.attention import LOAD_BYTES, AttentionCore, FlexCore, Sdpa, VarlenCore
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
    attention: AttentionConfig, config: ModelConfig, core: AttentionCore
) -> Attention:
    """The attention of a layer. TypeError for dimensions that no variant has registered."""
    raise TypeError(f"models/attention.py builds no attention from a {type(attention).__name__}")


@build_attention.register(GQAConfig)
class GQA(Attention):
    """Grouped-query attention (arXiv 2305.13245).

    Queries in `num_heads` heads, keys and values in `num_kv_heads`; each may be normed. Where
    positions do not rotate queries and keys, `temperature` may scale queries.
    """

    def __init__(self, attention: GQAConfig, config: ModelConfig, core: AttentionCore) -> None:
        super().__init__()
        self.config, self.core = attention, core
        self.scale = attention.scale or attention.head_dim**-0.5 * softmax_factor(attention.rope)
        dim, bias, heads, kv_heads = (
            config.dim, attention.bias, attention.num_heads, attention.num_kv_heads
        )  # fmt: skip
        gates = heads if attention.gate == "channels" else 0
        self.wq = nn.Linear(dim, (heads + gates) * attention.head_dim, bias=bias)
        self.wk = nn.Linear(dim, kv_heads * attention.head_dim, bias=bias)
        self.wv: nn.Linear | None = None
        if not attention.shares_kv:
            self.wv = nn.Linear(dim, kv_heads * attention.v_dim, bias=bias)
        self.wo = nn.Linear(heads * attention.v_dim, dim, bias=bias and attention.output_bias)
        self.wg = nn.Linear(dim, heads, bias=False) if attention.gate == "heads" else None
        # Norms of whole projections, over all heads; norms of each head.
        self.wq_norm: nn.Module = nn.Identity()
        self.wk_norm: nn.Module = nn.Identity()
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if attention.qk_norm == "across_heads":
            self.wq_norm = nn.RMSNorm(self.wq.out_features, eps=config.norm_eps)
            self.wk_norm = nn.RMSNorm(self.wk.out_features, eps=config.norm_eps)
        elif attention.qk_norm == "learned":
            self.q_norm = norm_of(config)(attention.head_dim)
            self.k_norm = norm_of(config)(attention.head_dim)
        self.norm = partial(F.rms_norm, eps=config.norm_eps)
        self.sinks = PerHead(heads) if attention.sinks else None

    def forward(
        self, x_BSD: Tensor, rotation: Rotation, mask: Any, counted_BS: Tensor | None = None
    ) -> Tensor:
        config, heads, gate = self.config, (-1, self.config.head_dim), None
        q, k = self.wq(x_BSD), self.wk(x_BSD)
        v = k if self.wv is None else self.wv(x_BSD)
        if config.gate == "channels":  # Each head's channels lie beside their gates.
            q, gate = (x.flatten(2) for x in q.unflatten(-1, (-1, 2, config.head_dim)).unbind(-2))
        q_BSHC = self.q_norm(self.wq_norm(q).unflatten(-1, heads))
        k_BSHC = self.k_norm(self.wk_norm(k).unflatten(-1, heads))
        v_BSHC = v.unflatten(-1, (-1, config.v_dim))
        if config.v_norm:
            v_BSHC = self.norm(v_BSHC, (config.v_dim,))
        if config.value_scale != 1:
            v_BSHC = v_BSHC * config.value_scale
        q_BSHC, k_BSHC = self.place(q_BSHC, k_BSHC, rotation)
        q_BHSC, k_BHSC, v_BHSC = (x.transpose(1, 2) for x in (q_BSHC, k_BSHC, v_BSHC))
        sinks_H = None if self.sinks is None else self.sinks()
        o_BHSC = self.attend(self.core, q_BHSC, k_BHSC, v_BHSC, mask, self.scale, sinks_H)
        o_BSHC = o_BHSC.transpose(1, 2)
        if self.wg is not None:
            o_BSHC = o_BSHC * self.wg(x_BSD).sigmoid()[..., None]
        o_BSD = o_BSHC.flatten(2)
        return self.wo(o_BSD if gate is None else o_BSD * gate.sigmoid())

    def place(self, q_BSHC: Tensor, k_BSHC: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Gives queries and keys their positions in the sequence."""
        config, rope = self.config, self.config.rope
        if rope is None:
            if config.temperature is not None:
                q_BSHC = _tempered(q_BSHC, rotation, config.temperature)
            return q_BSHC, k_BSHC
        q_BSHC, k_BSHC = (rotate(x_BSHC, rotation, rope.pairing) for x_BSHC in (q_BSHC, k_BSHC))
        if config.qk_norm != "unweighted":
            return q_BSHC, k_BSHC
        channels = (config.head_dim,)
        return self.norm(q_BSHC, channels), self.norm(k_BSHC, channels)


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

    def __init__(self, attention: MLAConfig, config: ModelConfig, core: AttentionCore) -> None:
        super().__init__()
        self.config, self.core = attention, core
        dim, qk_dim = config.dim, attention.qk_dim
        self.scale = qk_dim**-0.5 * softmax_factor(attention.rope)
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
        config, rope = self.config, self.config.rope
        whole_rank = config.q_rank is None
        q, latent = (self.wq if whole_rank else self.wq_a)(x_BSD), self.wkv_a(x_BSD)
        q_latent = q if whole_rank else self.q_norm(q)
        q = q if whole_rank else self.wq_b(q_latent)
        q_BSHC = q.unflatten(-1, (-1, config.qk_dim))
        if rope is not None:
            q_BSHC = rotate(q_BSHC, rotation, rope.pairing, first=config.nope_dim)

        latent_BSR, k_rope = latent.split([config.kv_rank, config.rope_dim], dim=-1)
        kv_BSHC = self.wkv_b(self.kv_norm(latent_BSR))
        kv_BSHC = kv_BSHC.unflatten(-1, (-1, config.nope_dim + config.v_dim))
        k_nope, v_BSHC = kv_BSHC.split([config.nope_dim, config.v_dim], dim=-1)
        if config.nope_dim * v_BSHC.element_size() % LOAD_BYTES:
            v_BSHC = v_BSHC.contiguous()  # Its rows begin between the loads of fused kernels.
        k_rope = k_rope[:, :, None]
        if rope is not None:
            k_rope = rotate(k_rope, rotation, rope.pairing)
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
    """The fastest core for a model that computes in `dtype`, with whole sequences on one device.

    Plain causal attention is left to torch, which on an H100 prefers cuDNN's kernel to flash.
    """
    if config.indexer is not None:
        return SparseAttention(mask_documents=mask_documents)
    kinds = config.attentions
    is_plain = not (mask_documents or any(each.local or each.sinks for each in kinds))
    # Blocks of compressed tokens add keys to an explicit mask.
    if is_plain or isinstance(config.attention, CompressedConfig):
        return Sdpa(mask_documents=mask_documents)
    has_sinks = any(each.sinks for each in kinds)
    takes = (varlen_attention.takes(each.qk_dim, each.v_dim, dtype) for each in kinds)
    if device_type == "cuda" and not has_sinks and all(takes):
        return VarlenCore(mask_documents=mask_documents)
    if takes_flex(config, dtype, device_type):
        return FlexCore(mask_documents=mask_documents, compiled=True)
    return Sdpa(mask_documents=mask_documents)


def takes_flex(config: ModelConfig, dtype: torch.dtype, device_type: str) -> bool:
    """Returns whether a type of device has compiled flex attention for the model's heads."""
    return device_type == "cuda" and all(
        flex_attention.takes(each.qk_dim, each.v_dim, dtype) for each in config.attentions
    )
