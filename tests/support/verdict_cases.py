"""Records of runs whose curves are known."""

from dataclasses import replace

import numpy as np

from titan_moe.verify.compare.records import Curve, RunRecord

STEPS = list(range(1, 21))


FACTS = {
    "torch": "2.13.0",
    "device": "cpu",
    "capability": "AVX512",
    "tokens_per_step": 512,
    "data": {"fingerprint": "1 x synthetic", "seed": 0},
}


def run(name: str, noise: float = 0.0, seed: int = 0, **facts) -> RunRecord:
    rng = np.random.default_rng(seed)
    falling = 6 * np.exp(-np.array(STEPS) / 20)
    scalars = {
        "loss": falling * np.exp(noise * rng.normal(size=20)),
        "grad_norm": falling / 3 * np.exp(noise * rng.normal(size=20)),
    }
    rows_SE = np.tile([100.0, 200, 300, 400], (20, 1))
    if noise:
        moved = rng.integers(0, 3, size=20)
        rows_SE[:, 0] += moved
        rows_SE[:, 1] -= moved
    curve = Curve(name, STEPS, scalars, {"layers.1": rows_SE}, [7 * step for step in STEPS])
    return RunRecord(name, curve, FACTS | facts)


def controls(number: int = 12, noise: float = 1e-4) -> list[RunRecord]:
    return [run(f"repeat {i}", noise, seed=i) for i in range(1, number + 1)]


def changed(record: RunRecord, **curve) -> RunRecord:
    return replace(record, curve=replace(record.curve, **curve))
