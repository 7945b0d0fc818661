"""Tokens per second, FLOP/s, and their share of what the device could do."""

from dataclasses import dataclass


def flops_per_token(
    *,
    matmul_params: int,
    seq_len: int,
    num_layers: int,
    num_heads: int,
    qk_head_dim: int,
    v_head_dim: int,
) -> float:
    """FLOPs of forward and backward for one token; recomputation does not count.

    A parameter of a matrix product costs 2 FLOPs forward and 4 backward (arXiv 2204.02311,
    appendix B). Attention is counted as causal: a token sees (seq_len + 1) / 2 tokens on average,
    half of what that paper counts.

    Args:
        matmul_params: parameters that one token is multiplied with: its routed experts, shared
            experts, router, attention projections and output head, not the embedding's lookup.
    """
    attention = num_layers * num_heads * (qk_head_dim + v_head_dim) * (seq_len + 1) / 2
    return 6.0 * (matmul_params + attention)


@dataclass(frozen=True)
class Throughput:
    """Turns tokens and seconds into metrics."""

    flops_per_token: float
    num_devices: int
    peak_tflops: float | None
    """Of one device, in the type it computes in; None where unknown."""

    def metrics(self, num_tokens: int, seconds: float) -> dict[str, float]:
        """Rates over num_tokens of the whole job in `seconds` of wall time; "mfu" is a fraction."""
        tokens_per_second = num_tokens / seconds
        per_device = tokens_per_second / self.num_devices
        tflops = per_device * self.flops_per_token / 1e12
        metrics = {
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": per_device,
            "tflops_per_device": tflops,
        }
        if self.peak_tflops is not None:
            metrics["mfu"] = tflops / self.peak_tflops
        return metrics
