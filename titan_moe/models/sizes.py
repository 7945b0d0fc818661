"""How many parameters each part of a decoder has, by arithmetic. No torch."""

from typing import NamedTuple

from titan_moe.models.config import GQAConfig, MLAConfig, ModelConfig


class Size(NamedTuple):
    """Parameters of a part: those that every token meets, and those of all routed experts."""

    dense: int
    routed: int = 0

    def active(self, config: ModelConfig) -> float:
        """Of how many a token meets."""
        moe = config.moe
        return self.dense + (self.routed * moe.top_k / moe.num_experts if moe else 0.0)


def part_sizes(config: ModelConfig) -> dict[str, Size]:
    """Sizes of all parts in the model's order: "tok_embeddings", "layers.0", ..., "norm", "output",
    and "mtp" where there is multi-token prediction.

    Copies of tied weights count: each is stored, with its gradient and optimizer state.
    """
    embedding = config.vocab_size * config.dim
    parts = {"tok_embeddings": Size(embedding)}
    parts |= {f"layers.{layer}": _layer(config, layer) for layer in range(config.num_layers)}
    parts |= {"norm": Size(config.dim), "output": Size(embedding)}
    if config.num_mtp_layers:
        blocks = [_layer(config, config.num_layers + k) for k in range(config.num_mtp_layers)]
        around = config.num_mtp_layers * (embedding + 2 * config.dim**2 + 3 * config.dim)
        dense, routed = (sum(numbers) for numbers in zip(*blocks, strict=True))
        parts["mtp"] = Size(around + dense, routed)
    return parts


def total(config: ModelConfig) -> Size:
    """The model as it is published: without multi-token prediction, tied weights once."""
    parts = part_sizes(config)
    parts.pop("mtp", None)
    if config.tied_embeddings:
        del parts["output"]
    return Size(sum(p.dense for p in parts.values()), sum(p.routed for p in parts.values()))


def _layer(config: ModelConfig, layer: int) -> Size:
    attention = config.attention
    own = _gqa if isinstance(attention, GQAConfig) else _mla
    dense = 2 * config.dim + own(config.dim, attention)  # type: ignore[arg-type]
    moe = config.moe
    if not config.is_moe_layer(layer) or moe is None:
        return Size(dense + 3 * config.dim * config.hidden_dim)
    expert = 3 * config.dim * moe.hidden_dim
    router = moe.num_experts * (config.dim + moe.router_bias)
    biases = moe.projection_bias * (2 * moe.hidden_dim + config.dim)
    return Size(
        dense + router + moe.num_shared_experts * expert, moe.num_experts * (expert + biases)
    )


def _gqa(dim: int, config: GQAConfig) -> int:
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = 2 * dim * (queries + keys)
    biases = config.bias * (queries + 2 * keys + dim)
    norms = 2 * config.head_dim * (config.qk_norm == "learned")
    return matrices + biases + norms + config.sinks * config.num_heads


def _mla(dim: int, config: MLAConfig) -> int:
    queries = config.num_heads * (config.nope_dim + config.rope_dim)
    latent = config.kv_rank + config.rope_dim
    matrices = (
        dim * latent
        + config.kv_rank * config.num_heads * (config.nope_dim + config.v_dim)
        + config.num_heads * config.v_dim * dim
    )
    biases = config.bias * (latent + dim + (config.q_rank or 0))
    if config.q_rank is None:
        return matrices + config.kv_rank + biases + dim * queries
    query = config.q_rank * (dim + queries + 1)
    return matrices + config.kv_rank + biases + query
