"""Runs as comparisons and reports read them from their files, and outcomes of a comparison."""

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan_moe.config.errors import ConfigError
from titan_moe.config.parse import tomllib
from titan_moe.metrics.jsonl import EVENTS, INITIAL_WEIGHTS, read_json_lines
from titan_moe.runtime.errors import reason

Array = NDArray[np.float64]

COMPARED = ("loss", "grad_norm")
"""Scalars that are compared bit by bit, and by their distance from a noise band."""
LOAD_OF, GRADIENT_OF = "load of ", "gradient of "
_LAYER = re.compile(r".*?\blayers\.\d+")


class Verdict(Enum):
    """The outcome of a comparison, and the exit code of a command that ends with it."""

    IDENTICAL = "identical bits", 0
    INSIDE = "inside the noise band", 3
    WITHIN = "within the tolerance that was given", 3
    DIFFERENT = "different", 1
    UNJUDGED = "not judged: other bits, and nothing says how much rounding may do", 5
    TOO_SLOW = "too slow", 6
    TOO_LARGE = "too large", 6
    COST_UNJUDGED = "its cost cannot be told from noise", 5

    def __init__(self, words: str, exit_code: int) -> None:
        self.words, self.exit_code = words, exit_code

    @property
    def passes(self) -> bool:
        return self.exit_code in (0, 3)


@dataclass(frozen=True)
class RunRecord:
    """A run: what it measured at its logged steps, its configuration, and where it ran."""

    name: str
    steps: Sequence[int]
    scalars: Mapping[str, Array]
    """All numbers of metrics.jsonl by their keys, [S] each; NaN where a step has none. With
    metrics.log_parameter_norms also those of `gradients`."""
    loads: Mapping[str, Array]
    """Rows of each expert by MoE layer, [S, E]; empty without metrics.log_expert_counts."""
    data: Sequence[int]
    """The fingerprint of each step's global batch."""
    facts: Mapping[str, Any]
    """run.json: code, torch, device, capability, world_size, layout, tokens_per_step, data, ..."""
    config: Mapping[str, Any]
    """config.toml, nested tables."""
    folder: Path | None = None
    events: Sequence[Mapping[str, Any]] = ()
    """events.jsonl: decisions about spikes and NaN."""
    weights: Mapping[str, str] = field(default_factory=dict)
    """Checksums of the initial weights by tensor; empty for runs that recorded none."""
    profile: Mapping[str, Any] = field(default_factory=dict)
    """The latest summary.json that `titan-moe report profile` made of the run; empty without."""

    def at(self, steps: Sequence[int]) -> "RunRecord":
        """Returns this run at some of its steps. Raises ConfigError if it lacks one."""
        places = {step: place for place, step in enumerate(self.steps)}
        if missing := [step for step in steps if step not in places]:
            raise ConfigError(f"{self.name}: step {missing[0]} is not logged there")
        own = [places[step] for step in steps]
        return replace(
            self,
            steps=list(steps),
            scalars={key: values[own] for key, values in self.scalars.items()},
            loads={key: values[own] for key, values in self.loads.items()},
            data=[self.data[place] for place in own],
        )


@dataclass(frozen=True)
class FirstDifference:
    """The step at which the candidate first left the band; without a band, the baseline's bits."""

    step: int
    quantity: str
    """"loss", "grad_norm", "load of layers.1", ..."""
    baseline: float
    """The baseline's value; with a band, the middle of the band."""
    candidate: float
    mean_over: int = 1
    """Steps, this one the last, whose mean is what left the band."""
    distance: float | None = None
    """Distance at this step, in limits of the band; None without a band."""
    tolerance: float | None = None
    """The relative difference that was allowed; None if none was given."""

    def line(self) -> str:
        mean = "" if self.mean_over == 1 else f" (mean of the last {self.mean_over} steps)"
        digits = 17 if self.tolerance is None and self.distance is None else 8  # All bits.
        here = f"at step {self.step}: {self.quantity}{mean} is {self.candidate:.{digits}g}"
        if self.tolerance is not None:
            return f"first beyond {self.tolerance:g} {here}, {self.baseline:.8g} in the baseline"
        if self.distance is None:
            return f"first other bits {here} in the candidate, {self.baseline:.17g} in the baseline"
        return (
            f"first outside {here}, the control runs have {self.baseline:.8g}; that is "
            f"{self.distance:,.3g} times as far as rounding takes it"
        )


def moved_share(first_SE: Array, second_SE: Array) -> Array:
    """The share of rows that went to other experts, [S], if experts' rows are the same."""
    return np.abs(second_SE - first_SE).sum(1) / (2 * np.maximum(first_SE.sum(1), 1.0))


def relative_difference(first: Array, second: Array) -> Array:
    """|second - first| / |first|, 0 where both are equal, infinite where one of them is not
    finite, NaN where both are not."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.abs(second - first) / np.abs(first)
    found[first == second] = 0.0
    finite = np.isfinite(first), np.isfinite(second)
    found[finite[0] ^ finite[1]] = np.inf
    found[~finite[0] & ~finite[1]] = np.nan
    return found


def read_run(path: Path, *, name: str = "") -> RunRecord:
    """Reads a run by its folder or its metrics.jsonl.

    Raises ConfigError where a file is missing or damaged.
    """
    folder = path.parent if path.name == "metrics.jsonl" else path
    for file in ("metrics.jsonl", "run.json", "config.toml"):
        if not (folder / file).is_file():
            raise ConfigError(f"{path}: there is no {file}")
    try:
        return _read(folder, name or folder.resolve().name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{folder}: a file of the run is damaged: {reason(error)}") from None


def _read(folder: Path, name: str) -> RunRecord:
    lines = {line["step"]: line for line in _steps(folder / "metrics.jsonl")}
    if not (steps := sorted(lines)):
        raise ConfigError(f"{folder}: no step is logged")
    logged = dict.fromkeys(key for line in lines.values() for key in line)
    counts, norms = (
        {line.pop("step"): line for line in _steps(folder / f"{name}.jsonl")}
        for name in ("expert_counts", "parameter_norms")
    )
    layers = counts[steps[0]] if counts.keys() >= set(steps) else ()
    parts = gradients([norms[s] for s in steps]) if norms.keys() >= set(steps) else {}
    weights = folder / INITIAL_WEIGHTS
    profiles = sorted(folder.glob("*/step-*/summary.json"), key=lambda path: path.stat().st_mtime)
    return RunRecord(
        name,
        steps,
        {
            key: np.array([lines[step].get(key) for step in steps], dtype=np.float64)  # None: NaN.
            for key in (*COMPARED, *logged)
        }
        | parts,
        {layer: np.array([counts[s][layer] for s in steps], dtype=np.float64) for layer in layers},
        [lines[step]["data"] for step in steps],
        json.loads((folder / "run.json").read_bytes()),
        tomllib.loads((folder / "config.toml").read_text(encoding="utf-8")),
        folder,
        _steps(folder / EVENTS),
        json.loads(weights.read_bytes()) if weights.is_file() else {},
        json.loads(profiles[-1].read_bytes()) if profiles else {},
    )


def gradients(lines: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Array]:
    """Returns norms of gradients by what a noise band compares, [S] each: "gradient of layers.1
    expert 3", "gradient of layers.1 shared experts", "gradient of layers.1" for the rest of it.

    Args:
        lines: norms by parameter, at each step.

    An expert's norm has four times the root mean square of its layer's experts added: noise of the
    logarithm is then alike in experts of many rows, of few, and of none.
    """
    squares: defaultdict[str, Array] = defaultdict(lambda: np.zeros(len(lines)))
    experts: defaultdict[str, list[str]] = defaultdict(list)
    for name in lines[0]:
        found = _LAYER.match(name)
        whole = GRADIENT_OF + (found[0] if found else name)
        square_SE = np.array([line[name] for line in lines], dtype=np.float64) ** 2  # None: NaN.
        if ".experts." in name:
            keys = [f"{whole} expert {number}" for number in range(square_SE.shape[1])]
            experts[whole] = keys
        else:
            keys = [f"{whole} shared experts" if ".shared_experts." in name else whole]
        for key, square_S in zip(keys, square_SE.T, strict=True):
            squares[key] += square_S
    # Logarithms stay finite.
    norms = {key: np.sqrt(square_S) + 1e-30 for key, square_S in squares.items()}
    for keys in experts.values():
        mean_S = np.sqrt(np.mean([squares[key] for key in keys], 0))
        norms |= {key: norms[key] + 4 * mean_S for key in keys}
    return norms


def _steps(path: Path) -> list[dict[str, Any]]:
    """Returns the lines that are of a step; none where there is no file."""
    return [line for line in read_json_lines(path) if "step" in line] if path.is_file() else []
