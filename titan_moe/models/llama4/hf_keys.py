"""Llama 4's names in Hugging Face folders: the text model's, or its part in the published one."""

from dataclasses import replace

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

_PROJECTIONS = (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))
_FEED_FORWARD: HFKeys = {
    f"{ours}.{w}.weight": (HFWeight(f"{theirs}.{projection}.weight"),)
    for ours, theirs in (
        ("feed_forward", "feed_forward"),
        ("moe.shared_experts", "feed_forward.shared_expert"),
    )
    for w, projection in _PROJECTIONS
}
_EXPERTS: HFKeys = {
    "moe.router.gate.weight": (HFWeight("feed_forward.router.weight"),),
    "moe.experts.w1": (
        HFWeight("feed_forward.experts.gate_up_proj", transposed=True, part="first half"),
    ),
    "moe.experts.w3": (
        HFWeight("feed_forward.experts.gate_up_proj", transposed=True, part="second half"),
    ),
    "moe.experts.w2": (HFWeight("feed_forward.experts.down_proj", transposed=True),),
}

IGNORED = ("vision_model.*", "multi_modal_projector.*", "*.rotary_emb.inv_freq")


def keys(config: ModelConfig) -> HFKeys:
    """Where each tensor is. Biases of the routing have no place."""
    assert isinstance(config.attention, GQAConfig)
    block = {**BLOCK_NORMS, **GQA, **_FEED_FORWARD, **_EXPERTS}
    if config.attention.bias:
        block |= GQA_BIASES
    text = {**EMBEDDINGS, **in_layers(block)}
    return {
        name: (*ways, *(replace(way, name=f"language_model.{way.name}") for way in ways))
        for name, ways in text.items()
    }
