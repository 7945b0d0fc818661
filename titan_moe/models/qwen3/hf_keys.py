"""Qwen3's names in Hugging Face folders."""

from titan_moe.models.config import GQAConfig, ModelConfig
from titan_moe.models.hf_keys import (
    BLOCK_NORMS,
    EMBEDDINGS,
    EXPERTS,
    FEED_FORWARD,
    GQA,
    GQA_BIASES,
    QK_NORMS,
    HFKeys,
    in_layers,
)


def keys(config: ModelConfig) -> HFKeys:
    """Where each tensor is. Biases of the routing have no place."""
    assert isinstance(config.attention, GQAConfig)
    block = {**BLOCK_NORMS, **GQA, **QK_NORMS, **FEED_FORWARD, **EXPERTS}
    if config.attention.bias:
        block |= GQA_BIASES
    return {**EMBEDDINGS, **in_layers(block)}
