"""How a decoder may be cut over tensor-parallel ranks, as data.

Patterns of module names to the ways that distributed/tensor_parallel.py explains. What a model does
not have, no pattern meets: one plan serves all families, multi-token prediction included. Every
module with parameters is named, also where it stays whole; routers and routed experts are not.
"""

from typing import Literal

TensorPlan = dict[
    str, Literal["gather", "colwise", "rowwise", "vocab_rows", "vocab_columns", "heads", "whole"]
]

_EMBEDDING_AND_OUTPUT: TensorPlan = {
    "*tok_embeddings": "vocab_rows",
    "output": "vocab_columns",
}

# MLA's down-projections and their norms see all tokens and feed the heads of every rank: whole.
_ATTENTION: TensorPlan = {
    "*.attention": "gather",
    "*.attention.wq": "colwise",
    "*.attention.wk": "colwise",
    "*.attention.wv": "colwise",
    "*.attention.wq_b": "colwise",
    "*.attention.wkv_b": "colwise",
    "*.attention.sinks": "heads",
    "*.attention.wo": "rowwise",
    "*.attention.wq_a": "whole",
    "*.attention.wkv_a": "whole",
}

_FEED_FORWARD: TensorPlan = {
    "*.feed_forward": "gather",
    "*.feed_forward.w1": "colwise",
    "*.feed_forward.w2": "rowwise",
    "*.feed_forward.w3": "colwise",
}

_SHARED_EXPERTS: TensorPlan = {
    "*.moe.shared_experts": "gather",
    "*.moe.shared_experts.w1": "colwise",
    "*.moe.shared_experts.w2": "rowwise",
    "*.moe.shared_experts.w3": "colwise",
}

# On a rank's part of the tokens, or on its heads; the projection is multi-token prediction's.
_WHOLE: TensorPlan = {
    "*norm": "whole",
    "*.projection": "whole",
}

DECODER: TensorPlan = {
    **_EMBEDDING_AND_OUTPUT,
    **_ATTENTION,
    **_FEED_FORWARD,
    **_SHARED_EXPERTS,
    **_WHOLE,
}
