"""Where things are."""

from pathlib import Path

REPO = Path(__file__).parents[2]
DEBUG_CONFIGS = REPO / "configs" / "debug"
