"""The table of agreement with `transformers`: family x option x type.

    python scripts/parity_table.py [--seeds 5] [--only gpt_oss] [--out FOLDER]

Prints markdown, and writes it with the numbers as JSON into a folder. Exit code 1 when a difference
exceeds its bound.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from tqdm import tqdm

try:
    import transformers
except ImportError:
    sys.exit("parity_table.py compares with transformers: pip install -e '.[dev]'")

from titan_moe.verify.parity.cases import ParityCase, cases
from titan_moe.verify.parity.check import BOUNDS, ParityResult, compare

_TYPES = (torch.float32, torch.float64)
_HEADER = """\
| family | option | f32: logits | gradient | losses | export | f64: logits | gradient | losses |
|---|---|---|---|---|---|---|---|---|"""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--out", type=Path, help="a folder for parity.md and parity.json")
    options = parser.parse_args(argv)
    chosen = [case for case in cases() if options.only in str(case)]
    found: dict[ParityCase, dict[torch.dtype, list[ParityResult]]] = {}
    for index in tqdm(range(len(chosen)), unit="case", disable=not sys.stderr.isatty()):
        case = chosen[index]
        seeds = range(options.seeds)
        found[case] = {dtype: [compare(case, s, dtype) for s in seeds] for dtype in _TYPES}
    table = _markdown(found, options.seeds)
    print(table)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "parity.md").write_text(table + "\n")
        (options.out / "parity.json").write_text(json.dumps(_records(found), indent=1) + "\n")
    worst = {d: max(each.worst for by in found.values() for each in by[d]) for d in _TYPES}
    return int(any(worst[dtype] > BOUNDS[dtype] for dtype in _TYPES))


def _markdown(
    found: dict[ParityCase, dict[torch.dtype, list[ParityResult]]], num_seeds: int
) -> str:
    lines = [
        f"Worst of {num_seeds} seeds, torch {torch.__version__}, "
        f"transformers {transformers.__version__}. Bounds: 1e-5 in float32, 1e-10 in float64.",
        "",
        _HEADER,
    ]
    for case, by_type in found.items():
        cells = [number for dtype in _TYPES for number in _cells(by_type[dtype], BOUNDS[dtype])]
        lines.append(f"| {case.family} | {case.option} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(differences: list[ParityResult], bound: float) -> list[str]:
    worst = [
        max(each.logits for each in differences),
        max(each.worst_gradient[0] for each in differences),
        max(each.losses for each in differences),
    ]
    exported = [each.exported for each in differences if each.exported is not None]
    worst += [max(exported)] if exported else []
    return [f"{value:.1e}" if value <= bound else f"**{value:.1e}**" for value in worst]


def _records(found: dict[ParityCase, dict[torch.dtype, list[ParityResult]]]) -> list[dict]:
    return [
        {
            "family": case.family,
            "option": case.option,
            "dtype": str(dtype).removeprefix("torch."),
            "seed": seed,
            "logits": each.logits,
            "gradient": each.worst_gradient[0],
            "gradient_of": each.worst_gradient[1],
            "losses": each.losses,
            "exported": each.exported,
            "margin": each.margin,
        }
        for case, by_type in found.items()
        for dtype, differences in by_type.items()
        for seed, each in enumerate(differences)
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
