"""Mixtral's names in Hugging Face folders."""

from titan_moe.models.config import ModelConfig
from titan_moe.models.hf_keys import (
    BLOCK_NORMS,
    EMBEDDINGS,
    EXPERTS,
    GQA,
    HFKeys,
    HFWeight,
    in_layers,
)

# As published, one tensor per expert; then as transformers 5 keeps them in memory.
_EXPERTS: HFKeys = {
    "moe.router.gate.weight": (
        HFWeight("block_sparse_moe.gate.weight"),
        *EXPERTS["moe.router.gate.weight"],
    ),
    **{
        f"moe.experts.{w}": (
            HFWeight(f"block_sparse_moe.experts.{{expert}}.{w}.weight"),
            *EXPERTS[f"moe.experts.{w}"],
        )
        for w in ("w1", "w2", "w3")
    },
}

IGNORED = ("model.layers.*.self_attn.rotary_emb.inv_freq",)


def keys(config: ModelConfig) -> HFKeys:
    """Where each tensor is. Biases of the routing have no place."""
    return {**EMBEDDINGS, **in_layers({**BLOCK_NORMS, **GQA, **_EXPERTS})}
