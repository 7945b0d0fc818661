"""How the shared parts of a decoder may be cut over tensor-parallel ranks, as data.

Patterns of module names to the ways that distributed/tensor_parallel.py explains. A family's plan,
in its `model.py`, is the sum of its parts'.
"""

from typing import Literal

TensorPlan = dict[str, Literal["gather", "colwise", "rowwise", "vocab_rows", "vocab_columns"]]

EMBEDDING_AND_OUTPUT: TensorPlan = {
    "tok_embeddings": "vocab_rows",
    "output": "vocab_columns",
}

GQA: TensorPlan = {
    "layers.*.attention": "gather",
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.wk": "colwise",
    "layers.*.attention.wv": "colwise",
    "layers.*.attention.wo": "rowwise",
}

# The down-projections and their norms see all tokens and feed the heads of every rank: whole.
MLA: TensorPlan = {
    "layers.*.attention": "gather",
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.wq_b": "colwise",
    "layers.*.attention.wkv_b": "colwise",
    "layers.*.attention.wo": "rowwise",
}

FEED_FORWARD: TensorPlan = {
    "layers.*.feed_forward": "gather",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "layers.*.feed_forward.w3": "colwise",
}

SHARED_EXPERTS: TensorPlan = {
    "layers.*.moe.shared_experts": "gather",
    "layers.*.moe.shared_experts.w1": "colwise",
    "layers.*.moe.shared_experts.w2": "rowwise",
    "layers.*.moe.shared_experts.w3": "colwise",
}
