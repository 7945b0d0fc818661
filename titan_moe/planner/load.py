"""States how evenly routers fill the ranks of experts. Imports no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from titan_moe.config.errors import ConfigError

_DRAWS = 64
"""Layers of a popularity that is drawn: enough for its mean over places of experts."""


@dataclass(frozen=True)
class Load:
    """The popularity of experts, as shares of a layer's rows."""

    name: str
    shares_LE: tuple[tuple[float, ...], ...] = ()
    """Shares of each layer's experts; empty: all experts get the same."""
    is_drawn: bool = False
    """Each token draws its experts: ranks differ by chance, the less the more rows they get."""

    def busiest(self, ep: int, rows: float) -> tuple[float, float]:
        """Returns how many times an even share of rows the busiest rank of `ep` gets: the rank that
        others wait for, which may be another in each layer, and the rank that gets most in all
        layers together, which needs most memory. `rows`: an even share of one layer."""
        if ep == 1:
            return 1.0, 1.0
        if self.is_drawn:
            # The largest of ep Poisson numbers of this mean, nearly.
            most = 1 + math.sqrt(2 * math.log(ep) / max(rows, 1.0))
            return most, most
        return _busiest(self.shares_LE, ep) if self.shares_LE else (1.0, 1.0)


BALANCED = Load("balanced")


@lru_cache(maxsize=64)
def _busiest(shares_LE: tuple[tuple[float, ...], ...], ep: int) -> tuple[float, float]:
    by_rank = []
    for shares_E in shares_LE:
        own = len(shares_E) // ep
        by_rank.append([ep * sum(shares_E[r * own : (r + 1) * own]) for r in range(ep)])
    mean = [sum(ranks) / len(by_rank) for ranks in zip(*by_rank, strict=True)]
    return sum(map(max, by_rank)) / len(by_rank), max(mean)


def read_load(text: str, num_experts: int) -> Load:
    """Returns the load of "balanced", "uniform" or "zipf:EXPONENT". Raises ConfigError."""
    kind, _, exponent = text.partition(":")
    if kind == "balanced" and not exponent:
        return BALANCED
    if kind == "uniform" and not exponent:
        return Load(text, is_drawn=True)
    try:
        power = float(exponent)
    except ValueError:
        power = -1.0
    if kind != "zipf" or not 0 <= power <= 10:
        raise ConfigError(
            f"--load {text}: choose balanced, uniform, zipf:EXPONENT of 0 to 10, or a run's folder "
            "with expert_counts.jsonl"
        )
    weights, places, layers = [(n + 1) ** -power for n in range(num_experts)], Random(0), []
    for _ in range(_DRAWS):
        places.shuffle(weights)
        layers.append(tuple(weight / sum(weights) for weight in weights))
    return Load(text, tuple(layers))


def load_of_counts(name: str, counts: Mapping[str, Sequence[float]], num_experts: int) -> Load:
    """Returns the load that was counted, by layer and expert. Raises ConfigError for counts of
    another model, and for none."""
    for layer, counts_E in counts.items():
        if len(counts_E) != num_experts:
            raise ConfigError(
                f"--load {name}: {layer} has {len(counts_E)} experts, and the model has "
                f"{num_experts}: choose counts of this model"
            )
    rows = {layer: sum(counts_E) for layer, counts_E in counts.items()}
    filled = [layer for layer, num_rows in rows.items() if num_rows > 0]
    if not filled:
        raise ConfigError(f"--load {name}: no expert got a row: train with log_expert_counts")
    return Load(name, tuple(tuple(n / rows[layer] for n in counts[layer]) for layer in filled))
