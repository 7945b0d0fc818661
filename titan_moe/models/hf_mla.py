"""config.json's keys and weights' names of multi-head latent attention, as DeepSeek has them."""

from titan_moe.config.errors import ConfigError
from titan_moe.models import hf_family as hf
from titan_moe.models.config import MLAConfig

MLA_KEYS = {
    **hf.DECODER_KEYS,
    "attention.q_rank": "q_lora_rank",
    "attention.kv_rank": "kv_lora_rank",
    "attention.nope_dim": "qk_nope_head_dim",
    "attention.rope_dim": "qk_rope_head_dim",
    "attention.v_dim": "v_head_dim",
    "num_mtp_layers": "num_nextn_predict_layers",
}
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
_INDEXER = {
    f"indexer.{name}": f"indexer.{name}"
    for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
}


def dense_layers(settings: hf.Settings, default: int) -> int:
    """The number of layers without experts. Raises ConfigError if they are not the first ones."""
    kinds = settings.get("mlp_layer_types")
    if kinds is None:
        return default
    dense = kinds.count("dense")
    if kinds == ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        return dense
    raise ConfigError(f"config.json: mlp_layer_types: only dense layers first, not {kinds}")


def mla_block(attention: MLAConfig) -> hf.HFKeys:
    """Names of each tensor of one block, but for a routing bias."""
    names = _KEYS_AND_VALUES | (_DIRECT_QUERY if attention.q_rank is None else _LATENT_QUERY)
    if attention.bias:
        names |= _BIASES
    if attention.indexer is not None:
        names |= _INDEXER
    feed_forward = {**hf.FEED_FORWARD, **hf.SHARED_EXPERTS, **hf.EXPERTS}
    return {**hf.BLOCK_NORMS, **feed_forward, **hf.renamed("attention.*", "self_attn.*", names)}
