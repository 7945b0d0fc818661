"""train_state.json: the state of a run that is no tensor.

    {"common": {"step": 10, ...},
     "data": the position of all sequences, as the loader's merge function gives it,
     "rng": [{"cpu": ...}, ...]}

The data position is that of the global batch's sequences, not of ranks: any number of data ranks
can go on from it. Random states belong to ranks, and are put back only where there are as many
ranks as before.
"""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titan_moe.distributed.agreement import from_every_rank
from titan_moe.runtime.log import log_on_rank_zero

TRAIN_STATE = "train_state.json"
DATA = "data"
RNG = "rng"

MergeData = Callable[[list[dict[str, Any]]], dict[str, Any]]
"""Makes one data position of those of all ranks, in rank order."""


def gather_rank_states(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns every rank's `state` with its random state added; collective."""
    mine = state | {RNG: get_random_state()}
    return from_every_rank(lambda: mine, doing="cannot gather the ranks' states")


def write_train_state(folder: Path, states: list[dict[str, Any]], merge_data: MergeData) -> None:
    """Write train_state.json. All but "data" and random states is the same on all ranks."""
    common = {key: value for key, value in states[0].items() if key not in (DATA, RNG)}
    merged = {"common": common, RNG: [state[RNG] for state in states]}
    if DATA in states[0]:
        merged[DATA] = merge_data([state[DATA] for state in states])
    (folder / TRAIN_STATE).write_text(json.dumps(merged))


def read_train_state(folder: Path) -> dict[str, Any]:
    """Returns the content of train_state.json, whose digest `read_manifest` compares."""
    return json.loads((folder / TRAIN_STATE).read_bytes())


def restore_random_state(train_state: dict[str, Any]) -> None:
    """Put back this rank's random state if there are as many ranks as before."""
    states = train_state[RNG]
    if len(states) == dist.get_world_size():
        set_random_state(states[dist.get_rank()])
    else:
        log_on_rank_zero("random states start fresh: %d ranks saved theirs", len(states))


def set_random_state(saved: dict[str, str]) -> None:
    """Put back what `get_random_state` gave."""
    buffers = {device: bytearray(base64.b64decode(text)) for device, text in saved.items()}
    states = {device: torch.frombuffer(of, dtype=torch.uint8) for device, of in buffers.items()}
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def get_random_state() -> dict[str, str]:
    """Returns the state of torch's generators on this rank, JSON-able."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {device: base64.b64encode(bytes(of.numpy())).decode() for device, of in states.items()}
