"""train_state.json: the state of a run that is no tensor.

    {"step": 10, "tokens": 40960, ...,
     "data": the position of all sequences, as the loader's merge function gives it}

The data position is that of the global batch's sequences, not of ranks: any number of data ranks
can go on from it. There are no random states: a step draws no random number.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

TRAIN_STATE = "train_state.json"
DATA = "data"

MergeData = Callable[[list[dict[str, Any]]], dict[str, Any]]
"""Makes one data position of those of all ranks, in rank order."""


def write_train_state(folder: Path, states: list[dict[str, Any]], merge_data: MergeData) -> None:
    """Write train_state.json from all ranks' states, which differ in "data" alone."""
    state = states[0]
    if DATA in state:
        state = state | {DATA: merge_data([each[DATA] for each in states])}
    (folder / TRAIN_STATE).write_text(json.dumps(state))


def read_train_state(folder: Path) -> dict[str, Any]:
    """Returns the content of train_state.json, whose digest `read_manifest` compares."""
    return json.loads((folder / TRAIN_STATE).read_bytes())
