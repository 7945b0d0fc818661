"""What each part of a decoder costs to compute: pipelines split by it, MFU counts it. No torch."""

from titan_moe.models.config import GQAConfig, LocalAttention, MLAConfig, ModelConfig
from titan_moe.moe.config import MoEConfig


def part_weights(config: ModelConfig, seq_len: int = 4096) -> dict[str, float]:
    """FLOPs of the matrix products of one token's forward, of every part in the model's order.

    Keys: "tok_embeddings" and "norm", which multiply no matrices and cost 0, "layers.0", ... and
    "output". A parameter that a token is multiplied with costs 2 FLOPs, routed experts only where
    they are active; attention counts the pairs that causal order over `seq_len` tokens and the
    layer's window or chunk leave. "output" holds all of multi-token prediction, its stage's work.
    """
    layers = {
        f"layers.{layer}": _layer(config, layer, seq_len) for layer in range(config.num_layers)
    }
    logits = 2.0 * config.dim * config.vocab_size
    projection = 2.0 * 2 * config.dim**2
    ahead = [
        projection + _layer(config, config.num_layers + depth, seq_len) + logits
        for depth in range(config.num_mtp_layers)
    ]
    return {"tok_embeddings": 0.0, **layers, "norm": 0.0, "output": logits + sum(ahead)}


def _layer(config: ModelConfig, layer: int, seq_len: int) -> float:
    seen = mean_seen(config.local_in(layer), seq_len)
    return _attention(config.dim, config.attention, seen) + _feed_forward(config, layer)


def mean_seen(local: LocalAttention | None, seq_len: int) -> float:
    """How many tokens of a row of `seq_len` a token sees on average, itself among them."""
    if local is None:
        return (seq_len + 1) / 2
    size = min(local.size, seq_len)
    if local.kind == "window":
        return (size * (size + 1) / 2 + (seq_len - size) * size) / seq_len
    pieces, rest = divmod(seq_len, size)
    return (pieces * size * (size + 1) / 2 + rest * (rest + 1) / 2) / seq_len


def _attention(dim: int, config: GQAConfig | MLAConfig, seen: float) -> float:
    if isinstance(config, GQAConfig):
        qk_dim = v_dim = config.head_dim
        params = 2 * dim * (config.num_heads + config.num_kv_heads) * config.head_dim
    else:
        qk_dim, v_dim = config.nope_dim + config.rope_dim, config.v_dim
        params = (
            _mla_query(dim, config, qk_dim)
            + dim * (config.kv_rank + config.rope_dim)
            + config.kv_rank * config.num_heads * (config.nope_dim + v_dim)
            + config.num_heads * v_dim * dim
        )
    scores_and_values = config.num_heads * (qk_dim + v_dim) * seen
    return 2.0 * (params + scores_and_values)


def _mla_query(dim: int, config: MLAConfig, qk_dim: int) -> int:
    width = config.num_heads * qk_dim
    return dim * width if config.q_rank is None else config.q_rank * (dim + width)


def _feed_forward(config: ModelConfig, layer: int) -> float:
    if not config.is_moe_layer(layer):
        return 2.0 * 3 * config.dim * config.hidden_dim
    assert config.moe is not None
    return 2.0 * _moe(config.dim, config.moe)


def _moe(dim: int, config: MoEConfig) -> int:
    active = config.top_k + config.num_shared_experts
    return dim * (config.num_experts + 3 * active * config.hidden_dim)
