"""Says how tensor parallelism cuts the modules of a decoder, as data."""

from typing import Literal

TensorPlan = dict[
    str,
    Literal[
        "gather", "colwise", "colwise_norm", "rowwise", "vocab_rows", "vocab_columns", "heads",
        "whole",
    ],
]  # fmt: skip

TENSOR_PLAN: TensorPlan = {
    "*tok_embeddings": "vocab_rows",
    "output": "vocab_columns",
    "*.attention": "gather",
    "*.attention.wq": "colwise",
    "*.attention.wk": "colwise",
    "*.attention.wv": "colwise",
    "*.attention.wg": "colwise",
    "*.attention.wq_b": "colwise",
    "*.attention.wkv_b": "colwise",
    "*.attention.wq_norm": "colwise_norm",
    "*.attention.wk_norm": "colwise_norm",
    "*.attention.sinks": "heads",
    # Recurrent layers: key heads in order, and the value heads of each.
    "*.attention.narrow.*": "whole",
    "*.attention.in_proj.*": "colwise",
    "*.attention.gates.*": "colwise",
    "*.attention.conv.*": "heads",
    "*.attention.conv_bias.*": "heads",
    "*.attention.out_norm.scale": "heads",
    "*.attention.decay.*": "heads",
    "*.attention.out_proj": "rowwise",
    "*.attention.wo": "rowwise",
    # MLA's down-projections and their norms see all tokens and feed the heads of every rank.
    "*.attention.wq_a": "whole",
    "*.attention.wkv_a": "whole",
    "*.attention.indexer.*": "whole",
    # Attention to blocks, and several streams, are refused.
    "*.attention.wkv": "whole",
    "*.attention.wo_a": "whole",
    "*.attention.compressor*": "whole",
    "*streams": "whole",
    "*.feed_forward": "gather",
    "*.feed_forward.w1": "colwise",
    "*.feed_forward.w2": "rowwise",
    "*.feed_forward.w3": "colwise",
    "*.moe.shared_experts": "gather",
    "*.moe.shared_experts.w1": "colwise",
    "*.moe.shared_experts.w2": "rowwise",
    "*.moe.shared_experts.w3": "colwise",
    # Multiplies what lies before w2, where each rank has its part of the channels.
    "*.moe.shared_experts.gate": "whole",
    "*norm": "whole",
    # Multi-token prediction projects a rank's part of the tokens.
    "*.projection": "whole",
}
"""The way in which tensor parallelism cuts the modules whose names match;
distributed/tensor_parallel.py explains each. One plan serves all families: patterns without a match
have no effect. Every module with parameters is named, also where it stays whole, but for routers
and routed experts."""
