"""FLOPs and rates against values computed by hand."""

import pytest

from titan_moe.metrics.throughput import Throughput, flops_per_token


def test_flops_per_token_by_hand():
    # Forward: 2 * 1000 for the parameters. Attention, 3 positions: a token sees 2 on average, so
    # 2 layers * 5 heads * (2 * 4 * 2 for the scores + 2 * 3 * 2 for the values) = 280.
    forward = 2 * 1000 + 280
    actual = flops_per_token(
        matmul_params=1000, seq_len=3, num_layers=2, num_heads=5, qk_head_dim=4, v_head_dim=3
    )
    assert actual == 3 * forward


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
