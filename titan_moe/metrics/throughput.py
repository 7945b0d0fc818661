"""Tokens per second, FLOP/s, and their share of what the device could do."""

from dataclasses import dataclass

# Dense bf16 TFLOP/s by the vendors' data sheets; the first name found in the device's own counts.
_PEAK_BF16_TFLOPS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("H200 NVL", 836.0),
    ("H200", 989.0),
    ("H100 NVL", 835.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("A100", 312.0),
    ("L40S", 362.0),
    ("MI325X", 1307.0),
    ("MI300X", 1307.0),
    ("MI250X", 191.5),  # one of its two dies: torch sees each as a device
)


def peak_bf16_tflops(device_name: str) -> float | None:
    """The bf16 peak of a device by its name (`torch.cuda.get_device_name()`), where it is known."""
    return next((peak for name, peak in _PEAK_BF16_TFLOPS if name in device_name), None)


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
