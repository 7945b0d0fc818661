"""DeepSeek: the shared decoder, with the dimensions of `config.py`."""

from titan_moe.models.config import ModelConfig
from titan_moe.models.decoder import Decoder
from titan_moe.models.layers.attention_core import AttentionCore
from titan_moe.models.tensor_plans import (
    EMBEDDING_AND_OUTPUT,
    FEED_FORWARD,
    MLA,
    SHARED_EXPERTS,
    TensorPlan,
)

TENSOR_PLAN: TensorPlan = {**EMBEDDING_AND_OUTPUT, **MLA, **FEED_FORWARD, **SHARED_EXPERTS}


def build(config: ModelConfig, core: AttentionCore) -> Decoder:
    """The plain model."""
    return Decoder(config, core)
