"""FLOPs and rates against values computed by hand."""

import pytest

from titan_moe.metrics.throughput import Throughput


def test_rates_per_job_and_per_device():
    throughput = Throughput(flops_per_token=2e9, num_devices=4, peak_tflops=10.0)
    assert throughput.metrics(num_tokens=6000, seconds=1.5) == pytest.approx(
        {
            "tokens_per_second": 4000,
            "tokens_per_second_per_device": 1000,
            "tflops_per_device": 2.0,
            "mfu": 0.2,
        }
    )


def test_no_mfu_without_a_known_peak():
    throughput = Throughput(flops_per_token=1.0, num_devices=1, peak_tflops=None)
    assert "mfu" not in throughput.metrics(num_tokens=1, seconds=1.0)
