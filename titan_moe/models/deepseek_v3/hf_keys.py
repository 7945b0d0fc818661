"""DeepSeek's names in Hugging Face folders (V2, V3, and models of their make)."""

from titan_moe.models.config import MLAConfig, ModelConfig
from titan_moe.models.hf_keys import (
    BLOCK_NORMS,
    EMBEDDINGS,
    EXPERTS,
    FEED_FORWARD,
    HFCopies,
    HFKeys,
    HFWeight,
    in_layers,
)

_DIRECT_QUERY = {"wq.weight": "q_proj.weight"}
_LATENT_QUERY = {
    "wq_a.weight": "q_a_proj.weight",
    "q_norm.weight": "q_a_layernorm.weight",
    "wq_b.weight": "q_b_proj.weight",
}
_KEYS_AND_VALUES = {
    "wkv_a.weight": "kv_a_proj_with_mqa.weight",
    "kv_norm.weight": "kv_a_layernorm.weight",
    "wkv_b.weight": "kv_b_proj.weight",
    "wo.weight": "o_proj.weight",
}
_BIASES = {
    "wq_a.bias": "q_a_proj.bias",
    "wkv_a.bias": "kv_a_proj_with_mqa.bias",
    "wo.bias": "o_proj.bias",
}
_SHARED_EXPERTS = {
    "w1.weight": "gate_proj.weight",
    "w2.weight": "down_proj.weight",
    "w3.weight": "up_proj.weight",
}
_MTP = {
    "embedding_norm.weight": "enorm.weight",
    "hidden_norm.weight": "hnorm.weight",
    "projection.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}

COPIES: HFCopies = {
    "model.layers.{layer}.embed_tokens.weight": "tok_embeddings.weight",
    "model.layers.{layer}.shared_head.head.weight": "output.weight",
}
IGNORED = ("model.layers.*.self_attn.rotary_emb.inv_freq",)


def keys(config: ModelConfig) -> HFKeys:
    """Where each tensor is. The routing's bias has a place beside sigmoid scores only (V3)."""
    assert isinstance(config.attention, MLAConfig)
    attention = _KEYS_AND_VALUES | (
        _DIRECT_QUERY if config.attention.q_rank is None else _LATENT_QUERY
    )
    if config.attention.bias:
        attention |= _BIASES
    block: dict[str, tuple[HFWeight, ...]] = {**BLOCK_NORMS, **FEED_FORWARD, **EXPERTS}
    block |= _under("attention.", "self_attn.", attention)
    block |= _under("moe.shared_experts.", "mlp.shared_experts.", _SHARED_EXPERTS)
    if config.moe is not None and config.moe.score == "sigmoid":
        block["moe.router.expert_bias"] = (HFWeight("mlp.gate.e_score_correction_bias"),)
    found = {**EMBEDDINGS, **in_layers(block)}
    if config.num_mtp_layers:
        found |= in_layers(block, ours="mtp.layers.{layer}.block.")
        found |= in_layers(_under("", "", _MTP), ours="mtp.layers.{layer}.")
    return found


def _under(ours: str, theirs: str, names: dict[str, str]) -> dict[str, tuple[HFWeight, ...]]:
    return {ours + name: (HFWeight(theirs + other),) for name, other in names.items()}
