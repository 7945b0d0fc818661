"""Names of weights in Hugging Face folders, as data: where each of our tensors is stored, and how.

No torch. In names, `{layer}` stands for a number on both sides; theirs counts multi-token
prediction layers on after the others, ours from 0 under `mtp.layers`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal


@dataclass(frozen=True)
class Rows:
    """Rows `first` to `last` of each group of `size` rows of theirs, one group after another."""

    first: int
    last: int
    size: int


@dataclass(frozen=True)
class HFWeight:
    """One way in which a tensor of ours is stored."""

    name: str
    """Name with {layer}, and with {expert} if each expert of a stack has a tensor of its own; else
    a stack is stored whole, experts first, like ours."""
    transposed: bool = False
    """Their last two dims are ours swapped."""
    rows: Literal["whole", "first half", "second half", "even", "odd"] | Rows = "whole"
    """The stored rows that are ours, if projections share a tensor: of a matrix, its second last
    dim in our order; of a bias, its last; `Rows` of the first dim."""
    ones: tuple[int, int] = (0, 0)
    """Dims of size 1 that are stored before and after ours."""


# Our name -> the ways it may be stored; the first is how it is published, and exported. A tensor
# that is stored nowhere (the previous load; a bias that the family's published code has not) is
# left out, and so are copies of tied weights, which take what the first of their group takes.
HFKeys = Mapping[str, tuple[HFWeight, ...]]


def renamed(ours: str, theirs: str, names: Mapping[str, str] | Sequence[str]) -> HFKeys:
    """Tensors that are stored like ours; in both patterns * stands for a name of the table, or of a
    sequence of names that are theirs too."""
    pairs = names.items() if isinstance(names, Mapping) else zip(names, names, strict=True)
    return {
        ours.replace("*", name): (HFWeight(theirs.replace("*", other)),) for name, other in pairs
    }


def either(*forms: HFKeys) -> HFKeys:
    """Tensors that may be stored in any of these forms; the first that has one is published."""
    return {
        name: tuple(way for form in forms for way in form.get(name, ()))
        for name in dict.fromkeys(chain(*forms))
    }


def sections(ours: str, theirs: str, **sizes: int) -> HFKeys:
    """Tensors that share one whose rows are groups of these sections; * stands for a section."""
    found, first, size = {}, 0, sum(sizes.values())
    for section, rows in sizes.items():
        way = HFWeight(theirs, rows=Rows(first, first + rows, size))
        found[ours.replace("*", section)] = (way,)
        first += rows
    return found


def stacks(module: str, *, transposed: bool = False, interleaved: bool = False) -> HFKeys:
    """Experts that are stored as stacks, with gate and up projections in one stack: one after the
    other, or with interleaved rows."""
    gate_up = f"{module}.gate_up_proj"
    return {
        "moe.experts.w1": (HFWeight(gate_up, transposed, "even" if interleaved else "first half"),),
        "moe.experts.w2": (HFWeight(f"{module}.down_proj", transposed),),
        "moe.experts.w3": (HFWeight(gate_up, transposed, "odd" if interleaved else "second half"),),
    }


# Weights that all descendants of Llama have; the tables below are of one layer.
EMBEDDINGS = renamed(
    "*.weight",
    "*.weight",
    {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"},
)
_BLOCK_NORMS = renamed(
    "*_norm.weight", "*_layernorm.weight", {"attention": "input", "ffn": "post_attention"}
)
_HEADS = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}
GQA_BLOCK: HFKeys = {
    **_BLOCK_NORMS,
    **renamed("attention.*.weight", "self_attn.*.weight", _HEADS),
    **renamed("attention.*.bias", "self_attn.*.bias", _HEADS),
}
QK_NORMS = renamed("attention.*_norm.weight", "self_attn.*_norm.weight", {"q": "q", "k": "k"})
PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
FEED_FORWARD = renamed("feed_forward.*.weight", "mlp.*.weight", PROJECTIONS)
SHARED_EXPERTS = renamed("moe.shared_experts.*.weight", "mlp.shared_experts.*.weight", PROJECTIONS)
# The form that Qwen and DeepSeek publish, or that of transformers 5 in memory.
EXPERTS = either(
    renamed("moe.*.weight", "mlp.*.weight", {"router.gate": "gate"}),
    renamed("moe.experts.*", "mlp.experts.{expert}.*.weight", PROJECTIONS),
    stacks("mlp.experts"),
)
ROUTING_BIAS = renamed("moe.router.*", "mlp.gate.*", {"expert_bias": "e_score_correction_bias"})
# The form that Mistral and MiniMax publish: one tensor per expert.
BLOCK_SPARSE_EXPERTS = either(
    renamed("moe.*.weight", "block_sparse_moe.*.weight", {"router.gate": "gate"}),
    renamed("moe.experts.*", "block_sparse_moe.experts.{expert}.*.weight", ("w1", "w2", "w3")),
    EXPERTS,
)
# DeepSeek's latent attention, with or without an indexer.
_LATENT = {
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
}
_INDEXER = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
MLA_BLOCK: HFKeys = {
    **_BLOCK_NORMS,
    **renamed("attention.*", "self_attn.*", _LATENT),
    **renamed("attention.indexer.*", "self_attn.indexer.*", _INDEXER),
    **FEED_FORWARD,
    **SHARED_EXPERTS,
    **EXPERTS,
}
"""Names of each tensor of one block, but for a routing bias."""
# Around the block of a multi-token prediction layer, as published by DeepSeek and Z.ai.
_MTP = renamed(
    "*.weight",
    "*.weight",
    {
        "embedding_norm": "enorm",
        "hidden_norm": "hnorm",
        "projection": "eh_proj",
        "norm": "shared_head.norm",
        "tok_embeddings": "embed_tokens",  # This and the next are copies (`HFModel.copies`).
        "output": "shared_head.head",
    },
)


def in_model(block: HFKeys) -> dict[str, tuple[HFWeight, ...]]:
    """The keys of a model with this block in each layer."""
    return {**EMBEDDINGS, **in_layers(block)}


def in_model_with_mtp(block: HFKeys) -> HFKeys:
    """The keys of a model with this block in each layer, multi-token prediction's too."""
    ahead = in_layers(block, ours="mtp.layers.{layer}.block.")
    return {**in_model(block), **ahead, **in_layers(_MTP, ours="mtp.layers.{layer}.")}


def in_layers(
    block: HFKeys, ours: str = "layers.{layer}.", theirs: str = "model.layers.{layer}."
) -> HFKeys:
    """The keys of one block, for all blocks under a prefix."""
    return {
        ours + name: tuple(replace(way, name=theirs + way.name) for way in ways)
        for name, ways in block.items()
    }
