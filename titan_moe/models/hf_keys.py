"""How a family's weights are named and laid out in Hugging Face folders, as data. No torch.

A family's `hf_keys.py` maps our names to theirs. On both sides `{layer}` stands for a number;
theirs counts multi-token prediction layers on after the others, ours from 0 under `mtp.layers`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class HFWeight:
    """One way in which a tensor of ours is stored."""

    name: str
    """With {layer}; with {expert} where each expert of a stack has a tensor of its own. Without it
    a stack is stored whole, experts first, like ours."""
    transposed: bool = False
    """Their last two dims are ours swapped."""
    part: Literal["whole", "first half", "second half", "even", "odd"] = "whole"
    """Which rows of theirs are ours, where gate and up projections share a tensor: of a matrix, its
    second last dim in our order; of a bias, its last."""


# Our name -> the ways it may be stored; the first is how it is published, and exported. What is
# stored nowhere (the previous load; a bias that the family's published code has not) is left out,
# and so are copies of tied weights, which take what the first of their group takes.
HFKeys = Mapping[str, tuple[HFWeight, ...]]

# Their name, with the {layer} of a multi-token prediction layer -> our tensor of which it is
# published as a copy. A family's `hf_keys.py` may have it as COPIES; copies may be missing on
# import, where they are not read.
HFCopies = Mapping[str, str]

# What Llama's descendants call the weights that all of them have; of one layer.
EMBEDDINGS: HFKeys = {
    "tok_embeddings.weight": (HFWeight("model.embed_tokens.weight"),),
    "norm.weight": (HFWeight("model.norm.weight"),),
    "output.weight": (HFWeight("lm_head.weight"),),
}
BLOCK_NORMS: HFKeys = {
    "attention_norm.weight": (HFWeight("input_layernorm.weight"),),
    "ffn_norm.weight": (HFWeight("post_attention_layernorm.weight"),),
}
GQA: HFKeys = {
    f"attention.{ours}": (HFWeight(f"self_attn.{theirs}"),)
    for ours, theirs in (
        ("wq.weight", "q_proj.weight"),
        ("wk.weight", "k_proj.weight"),
        ("wv.weight", "v_proj.weight"),
        ("wo.weight", "o_proj.weight"),
    )
}
GQA_BIASES: HFKeys = {
    name.replace("weight", "bias"): (HFWeight(ways[0].name.replace("weight", "bias")),)
    for name, ways in GQA.items()
}
QK_NORMS: HFKeys = {
    f"attention.{norm}.weight": (HFWeight(f"self_attn.{norm}.weight"),)
    for norm in ("q_norm", "k_norm")
}
FEED_FORWARD: HFKeys = {
    "feed_forward.w1.weight": (HFWeight("mlp.gate_proj.weight"),),
    "feed_forward.w2.weight": (HFWeight("mlp.down_proj.weight"),),
    "feed_forward.w3.weight": (HFWeight("mlp.up_proj.weight"),),
}
# As published by Qwen and DeepSeek, or as transformers 5 keeps them in memory.
EXPERTS: HFKeys = {
    "moe.router.gate.weight": (HFWeight("mlp.gate.weight"),),
    "moe.experts.w1": (
        HFWeight("mlp.experts.{expert}.gate_proj.weight"),
        HFWeight("mlp.experts.gate_up_proj", part="first half"),
    ),
    "moe.experts.w2": (
        HFWeight("mlp.experts.{expert}.down_proj.weight"),
        HFWeight("mlp.experts.down_proj"),
    ),
    "moe.experts.w3": (
        HFWeight("mlp.experts.{expert}.up_proj.weight"),
        HFWeight("mlp.experts.gate_up_proj", part="second half"),
    ),
}


def in_layers(
    block: HFKeys, ours: str = "layers.{layer}.", theirs: str = "model.layers.{layer}."
) -> HFKeys:
    """The keys of one block, for all blocks under a prefix."""
    return {
        ours + name: tuple(replace(way, name=theirs + way.name) for way in ways)
        for name, ways in block.items()
    }
