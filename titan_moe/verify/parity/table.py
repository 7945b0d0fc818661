"""Agreement with `transformers` over all cases, as markdown and as records."""

import sys
from dataclasses import asdict
from typing import Any

import torch
import transformers
from tqdm import tqdm

from titan_moe.verify.gradients.compare import worst
from titan_moe.verify.parity.check import BOUNDS, ParityCase, ParityResult, cases, compare

_TYPES = (torch.float32, torch.float64)
_ALWAYS = ("logits", "gradient", "losses")
"""Differences that there are in both types."""
_HEADER = """\
| family | option | f32: logits | gradient | losses | export | f64: logits | gradient | losses |
|---|---|---|---|---|---|---|---|---|"""

Found = dict[ParityCase, dict[torch.dtype, list[ParityResult]]]
"""Differences by case and type, one for each seed."""


def compare_all(name: str, num_seeds: int) -> Found:
    """Compares both models in every case whose name contains `name`, on seeds 0 to num_seeds -
    1."""
    chosen = [case for case in cases() if name in str(case)]
    return {
        case: {dtype: [compare(case, seed, dtype) for seed in range(num_seeds)] for dtype in _TYPES}
        for case in tqdm(chosen, unit="case", disable=not sys.stderr.isatty())
    }


def exceeds_a_bound(found: Found) -> bool:
    """Says whether a difference is larger than its type allows, or a case compared nothing."""
    return any(
        not worst(each.worst for each in differences) <= BOUNDS[dtype]
        for by_type in found.values()
        for dtype, differences in by_type.items()
    )


def markdown(found: Found, num_seeds: int) -> str:
    """One row a case: the worst of its seeds; what exceeds a bound in bold."""
    lines = [
        f"Worst of {num_seeds} seeds, torch {torch.__version__}, "
        f"transformers {transformers.__version__}. Bounds: 1e-5 in float32, 1e-10 in float64.",
        "",
        _HEADER,
    ]
    for case, by_type in found.items():
        narrow, wide = (_cells(by_type[dtype], BOUNDS[dtype]) for dtype in _TYPES)
        # Without an export there is nothing to load.
        cells = [*narrow, *["—"] * (4 - len(narrow)), *wide]
        lines.append(f"| {case.family} | {case.option} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(differences: list[ParityResult], bound: float) -> list[str]:
    cells = [worst(getattr(each, name) for each in differences) for name in _ALWAYS]
    exported = [each.exported for each in differences if each.exported is not None]
    cells += [worst(exported)] if exported else []
    return [f"{value:.1e}" if value <= bound else f"**{value:.1e}**" for value in cells]


def records(found: Found) -> list[dict[str, Any]]:
    """One record a case, type and seed."""
    return [
        {
            "family": case.family,
            "option": case.option,
            "dtype": str(dtype).removeprefix("torch."),
            "seed": seed,
            **asdict(each),
        }
        for case, by_type in found.items()
        for dtype, differences in by_type.items()
        for seed, each in enumerate(differences)
    ]
