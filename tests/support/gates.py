"""Gates of the families, and the sample of layouts that the suite looks at."""

from collections.abc import Callable
from pathlib import Path

import torch

from tests.support.paths import DEBUG_CONFIGS
from titan_moe.config.parse import load_job
from titan_moe.models.registry import FAMILIES
from titan_moe.verify.gradients.gate import Gate
from titan_moe.verify.layouts.covering import cover_options, cover_pairs
from titan_moe.verify.layouts.layouts import legal_layouts

Gates = Callable[[str], Gate]


def gate_of(family: str, folder: Path) -> Gate:
    torch.set_num_threads(1)
    return Gate(load_job(["--job.config_file", str(DEBUG_CONFIGS / f"gate_{family}.toml")]), folder)


def cover(worlds: list[int], count: int, seed: int) -> list[str]:
    """A sample as text, of which the smaller worlds give what they can."""
    layouts = [layout for world in worlds for layout in legal_layouts(world)]
    return [str(layout) for layout in cover_options(cover_pairs(layouts, count, seed))]


SAMPLE = cover([2, 4, 8], 30, seed=22)
SMALL = cover([4], 10, seed=0)
"""Of the default tier: as few ranks and layouts as every pair of axes needs."""


OTHERS = [family for family in FAMILIES if family != "deepseek_v3"]
