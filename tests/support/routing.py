"""What a run with debug.routing_replay writes."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from titan_moe.metrics.jsonl import read_json_lines
from titan_moe.routing.replay import FLIPS_FILE


def own_choices(folder: Path) -> NDArray[np.int64]:
    """Slots that the run's own router would have chosen otherwise, by step and layer, [S, L]."""
    lines = [line for line in read_json_lines(folder / FLIPS_FILE) if "step" in line]
    return np.array([list(line["flips"].values()) for line in lines])
