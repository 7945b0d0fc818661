"""Tokens per second, FLOP/s, and their share of what the device could do."""

from dataclasses import dataclass


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
