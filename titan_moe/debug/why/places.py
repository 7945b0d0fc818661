"""Which layers and experts the gradient of a step is in.

Squared norms of parameters add up to the step's, so a layer's or an expert's share is exact.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from titan_moe.debug.why.findings import Expert, Figures, Layer, heaviest_first
from titan_moe.debug.why.usual import Measured

_EXPERTS = ".moe.experts."
_GROWN = 1.5
_MOST_ROWS = 3


def middle(steps: Sequence[Measured]) -> Measured:
    """The medians of several steps, number by number."""
    names = steps[0].norms
    return Measured(
        Figures(median(s.figures.loss for s in steps), median(s.figures.norm for s in steps)),
        {name: _medians([step.norms[name] for step in steps]) for name in names},
        {layer: _medians([step.counts[layer] for step in steps]) for layer in steps[0].counts},
    )


def layer_figures(now: Measured, beside: Measured | None) -> list[Layer]:
    """All layers, the one that explains most first."""
    squares, whole = _by_layer(now), now.figures.norm**2
    usual = {} if beside is None else _by_layer(beside)
    found = []
    for name, parameters in squares.items():
        own = sum(parameters.values())
        found.append(
            Layer(
                name,
                norm=math.sqrt(own),
                share=own / whole if whole else 0.0,
                usual=math.sqrt(sum(usual[name].values())) if usual else math.nan,
                largest=min(parameters, key=lambda each: heaviest_first(parameters[each])),
                without=math.sqrt(max(whole - own, 0.0)),
            )
        )
    return sorted(found, key=lambda each: _key(each.norm, each.usual, now, beside))


def expert_figures(
    now: Measured, beside: Measured | None, by_row: Sequence[Mapping[str, Sequence[int]]]
) -> list[Expert]:
    """All routed experts, the one that explains most first.

    Args:
        by_row: tokens of each expert by layer, of every sequence.
    """
    squares, whole = _by_expert(now.norms), now.figures.norm**2
    usual = {} if beside is None else _by_expert(beside.norms)
    found = []
    for (layer, expert), own in squares.items():
        load = now.counts[layer]
        rows = sorted(((of[layer][expert], row) for row, of in enumerate(by_row)), reverse=True)
        found.append(
            Expert(
                layer,
                expert,
                norm=math.sqrt(own),
                share=own / whole if whole else 0.0,
                usual=math.sqrt(usual[layer, expert]) if usual else math.nan,
                load=int(load[expert]),
                usual_load=math.nan if beside is None else beside.counts[layer][expert],
                even_load=sum(load) / len(load),
                from_rows=[(row, count) for count, row in rows[:_MOST_ROWS] if count],
                without=math.sqrt(max(whole - own, 0.0)),
            )
        )
    return sorted(found, key=lambda each: _key(each.norm, each.usual, now, beside))


def norm_without_expert(norms: Mapping[str, Sequence[float]], layer: str, expert: int) -> float:
    """The norm of all but an expert's own gradient."""
    left = [
        norm
        for name, of in norms.items()
        for number, norm in enumerate(of)
        if not (name.startswith(layer + _EXPERTS) and number == expert)
    ]
    return math.sqrt(sum(norm * norm for norm in left))


def _key(norm: float, usual: float, now: Measured, beside: Measured | None) -> float:
    """Of a step that has grown, by what has grown; else by all there is."""
    grown = beside is not None and now.figures.norm > _GROWN * beside.figures.norm
    return heaviest_first(norm * norm - (usual * usual if grown else 0.0))


def _by_layer(measured: Measured) -> dict[str, dict[str, float]]:
    """Squares of parameters by layer."""
    found: dict[str, dict[str, float]] = {}
    for name, norms in measured.norms.items():
        words = name.split(".")
        length = {"layers": 2, "mtp": 3}.get(words[0], 1)
        of_layer = found.setdefault(".".join(words[:length]), {})
        of_layer[name] = sum(norm * norm for norm in norms)
    return found


def _by_expert(norms: Mapping[str, Sequence[float]]) -> dict[tuple[str, int], float]:
    found: dict[tuple[str, int], float] = {}
    for name, of in norms.items():
        layer, stack, _ = name.partition(_EXPERTS)
        for expert, norm in enumerate(of if stack else ()):
            found[layer, expert] = found.get((layer, expert), 0.0) + norm * norm
    return found


def _medians(steps: Iterable[Sequence[float]]) -> list[float]:
    return [median(values) for values in zip(*steps, strict=True)]
