"""config.json's keys and weights' names of multi-head latent attention, as DeepSeek has them."""

from collections.abc import Mapping

from titan_moe.config.errors import ConfigError
from titan_moe.models import hf_family as hf
from titan_moe.models.hf_rope import rope_from_hf

MLA_KEYS = {
    **hf.DECODER_KEYS,
    "attention.q_rank": "q_lora_rank",
    "attention.kv_rank": "kv_lora_rank",
    "attention.nope_dim": "qk_nope_head_dim",
    "attention.rope_dim": "qk_rope_head_dim",
    "attention.v_dim": "v_head_dim",
    "num_mtp_layers": "num_nextn_predict_layers",
}
_NAMES = {
    "wq.weight": "q_proj.weight",
    "wq_a.weight": "q_a_proj.weight",
    "wq_a.bias": "q_a_proj.bias",
    "q_norm.weight": "q_a_layernorm.weight",
    "wq_b.weight": "q_b_proj.weight",
    "wkv_a.weight": "kv_a_proj_with_mqa.weight",
    "wkv_a.bias": "kv_a_proj_with_mqa.bias",
    "kv_norm.weight": "kv_a_layernorm.weight",
    "wkv_b.weight": "kv_b_proj.weight",
    "wo.weight": "o_proj.weight",
    "wo.bias": "o_proj.bias",
    "indexer.wq_b.weight": "indexer.wq_b.weight",
    "indexer.wk.weight": "indexer.wk.weight",
    "indexer.k_norm.weight": "indexer.k_norm.weight",
    "indexer.k_norm.bias": "indexer.k_norm.bias",
    "indexer.weights_proj.weight": "indexer.weights_proj.weight",
}
MLA_BLOCK: hf.HFKeys = {
    **hf.BLOCK_NORMS,
    **hf.renamed("attention.*", "self_attn.*", _NAMES),
    **hf.FEED_FORWARD,
    **hf.SHARED_EXPERTS,
    **hf.EXPERTS,
}
"""Names of each tensor of one block, but for a routing bias."""


def read_mla(settings: hf.Settings, keys: Mapping[str, str], defaults: hf.Settings) -> hf.Fields:
    """The fields of a table that has MLA_KEYS, and `rope`.

    Raises ConfigError for heads that share keys, and for layers without experts among others.
    """
    hf.only(settings, num_key_value_heads=(hf.needed(settings, "num_attention_heads"),))
    hf.only(settings, mlp_bias=(False,), moe_layer_freq=(1,), rope_interleave=(True,))
    ahead = {"num_nextn_predict_layers": hf.given(settings, "num_mtp_layers", 0)}
    fields = hf.read_fields(settings, keys, {**ahead, **defaults})
    if (kinds := settings.get("mlp_layer_types")) is not None:
        dense = kinds.count("dense")
        if kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
            raise ConfigError(f"config.json: mlp_layer_types: only dense layers first, not {kinds}")
        fields["num_dense_layers"] = dense
    fields["rope"] = rope_from_hf(settings, "neighbours", latent=True)
    return fields
