"""gpt-oss's names in Hugging Face folders: stacks of experts, gate and up interleaved."""

from titan_moe.models.config import GQAConfig, ModelConfig
from titan_moe.models.hf_keys import (
    BLOCK_NORMS,
    EMBEDDINGS,
    GQA,
    GQA_BIASES,
    HFKeys,
    HFWeight,
    in_layers,
)

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

IGNORED = ("model.layers.*.self_attn.rotary_emb.inv_freq",)


def keys(config: ModelConfig) -> HFKeys:
    """Where each tensor is. Biases of the routing's choice have no place."""
    assert isinstance(config.attention, GQAConfig)
    block = {**BLOCK_NORMS, **GQA, **_SINKS, **_EXPERTS}
    if config.attention.bias:
        block |= GQA_BIASES
    return {**EMBEDDINGS, **in_layers(block)}
