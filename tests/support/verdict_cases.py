"""Records of runs whose curves are known."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from titan_moe.verify.compare.records import RunRecord

STEPS = list(range(1, 21))


FACTS = {
    "torch": "2.13.0",
    "device": "cpu",
    "capability": "AVX512",
    "tokens_per_step": 512,
    "code": {},
    "data": {"fingerprint": "1 x synthetic", "seed": 0},
    "layout": dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp", "edp", "ep", "etp"), 1),
}


def run(
    name: str,
    noise: float = 0.0,
    seed: int = 0,
    *,
    steps: Sequence[int] = STEPS,
    rows: Sequence[float] = (100, 200, 300, 400),
    layers: int = 1,
    config: Mapping[str, Any] = MappingProxyType({}),
    **facts: Any,
) -> RunRecord:
    """Returns a run whose curves fall. Noise moves them, and rows between the first two experts.

    Args:
        rows: of each expert in a step of a layer.
    """
    rng, number = np.random.default_rng(seed), len(steps)
    falling = 6 * np.exp(-np.array(steps) / 20)
    scalars = {
        "loss": falling * np.exp(noise * rng.normal(size=number)),
        "grad_norm": falling / 3 * np.exp(noise * rng.normal(size=number)),
    }
    loads = {}
    for layer in range(1, layers + 1):
        rows_SE = np.tile(np.array(rows, float), (number, 1))
        moved = rng.integers(0, 3, size=number) * (noise > 0)
        rows_SE[:, 0] += moved
        rows_SE[:, 1] -= moved
        loads[f"layers.{layer}"] = rows_SE
    data = [7 * step for step in steps]
    config = {"training": {"steps": STEPS[-1]}, **config}
    return RunRecord(name, list(steps), scalars, loads, data, FACTS | facts, config)


def controls() -> list[RunRecord]:
    return [run(f"repeat {i}", 1e-4, seed=i) for i in range(1, 13)]
