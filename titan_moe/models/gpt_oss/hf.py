"""gpt-oss in Hugging Face folders: stacks of experts, gate and up interleaved."""

from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.models.config import GQAConfig, ModelConfig, RopeConfig
from titan_moe.models.hf_family import (
    BLOCK_NORMS,
    EMBEDDINGS,
    GQA,
    GQA_BIASES,
    HFCopies,
    HFKeys,
    HFWeight,
    Settings,
    attention_of,
    experts_of,
    given,
    in_layers,
    needed,
    only,
    period,
    rope_from_hf,
    rope_to_hf,
)
from titan_moe.moe.config import MoEConfig
from titan_moe.ops.local_attention import LocalAttention

_FAMILY = "gpt_oss"
MODEL_TYPES = ("gpt_oss",)
IGNORED = ("model.layers.*.self_attn.rotary_emb.inv_freq",)
COPIES: HFCopies = {}

_NO_SCALING = {"rope_type": "default"}


def from_hf(settings: Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    only(settings, hidden_act=("silu",), swiglu_alpha=(1.702,), swiglu_limit=(7.0,))
    heads, dim = needed(settings, "num_attention_heads"), needed(settings, "hidden_size")
    hidden_dim = needed(settings, "intermediate_size")
    return ModelConfig(
        vocab_size=needed(settings, "vocab_size"),
        dim=dim,
        num_layers=needed(settings, "num_hidden_layers"),
        hidden_dim=hidden_dim,
        attention=GQAConfig(
            num_heads=heads,
            num_kv_heads=given(settings, "num_key_value_heads", heads),
            head_dim=given(settings, "head_dim", dim // heads),
            bias=given(settings, "attention_bias", True),
            sinks=True,
        ),
        rope=_rope(settings),
        local=_local(settings),
        moe=MoEConfig(
            num_experts=needed(settings, "num_local_experts"),
            top_k=needed(settings, "num_experts_per_tok"),
            hidden_dim=hidden_dim,
            normalize_top_k=True,
            router_bias=True,
            projection_bias=True,
            activation="clamped_swiglu",
        ),
        tied_embeddings=given(settings, "tie_word_embeddings", False),
        max_seq_len=given(settings, "max_position_embeddings", 131_072),
        norm_eps=given(settings, "rms_norm_eps", 1e-5),
        init_std=given(settings, "initializer_range", 0.02),
    )


def _rope(settings: Settings) -> RopeConfig:
    # Where nothing is said, transformers takes the published models' YaRN.
    if settings.get("rope_parameters") is None and settings.get("rope_scaling") is None:
        raise ConfigError(
            ["config.json: rope_scaling is missing; none is {'rope_type': 'default'}"]
        )
    return rope_from_hf(settings)


def _local(settings: Settings) -> LocalAttention | None:
    window, num_layers = settings.get("sliding_window"), needed(settings, "num_hidden_layers")
    alternating = ["sliding_attention", "full_attention"] * num_layers
    kinds = given(settings, "layer_types", alternating[:num_layers])
    sees_all = [kind == "full_attention" for kind in kinds]
    if window is None or all(sees_all):
        return None
    return LocalAttention("window", window, global_every=period("layer_types", sees_all))


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json of these dimensions."""
    attention, moe = attention_of(config, GQAConfig, _FAMILY), experts_of(config, _FAMILY)
    local = [config.local_in(layer) is not None for layer in range(config.num_layers)]
    rope = rope_to_hf(config.rope)
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": moe.hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "attention_bias": attention.bias,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "max_position_embeddings": config.max_seq_len,
        "initializer_range": config.init_std,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "use_cache": True,
        "sliding_window": None if config.local is None else config.local.size,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in local],
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "output_router_logits": False,
        "router_aux_loss_coef": moe.global_aux_loss_weight,
        **rope,
        "rope_scaling": rope["rope_scaling"] or _NO_SCALING,
    }


_SINKS: HFKeys = {"attention.sinks.weight": (HFWeight("self_attn.sinks"),)}
_EXPERTS: HFKeys = {
    "moe.router.gate.weight": (HFWeight("mlp.router.weight"),),
    "moe.router.gate.bias": (HFWeight("mlp.router.bias"),),
    "moe.experts.w1": (HFWeight("mlp.experts.gate_up_proj", transposed=True, part="even"),),
    "moe.experts.w3": (HFWeight("mlp.experts.gate_up_proj", transposed=True, part="odd"),),
    "moe.experts.w2": (HFWeight("mlp.experts.down_proj", transposed=True),),
    "moe.experts.b1": (HFWeight("mlp.experts.gate_up_proj_bias", part="even"),),
    "moe.experts.b3": (HFWeight("mlp.experts.gate_up_proj_bias", part="odd"),),
    "moe.experts.b2": (HFWeight("mlp.experts.down_proj_bias"),),
}


def keys(config: ModelConfig) -> HFKeys:
    """Where each tensor is. Biases of the routing's choice have no place."""
    attention = attention_of(config, GQAConfig, _FAMILY)
    block = {**BLOCK_NORMS, **GQA, **_SINKS, **_EXPERTS}
    if attention.bias:
        block |= GQA_BIASES
    return {**EMBEDDINGS, **in_layers(block)}
