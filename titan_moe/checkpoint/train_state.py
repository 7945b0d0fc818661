"""train_state.json: everything of a run that is no tensor.

    {"common": {"step": 10, ...},
     "data": the position of all rows, as the loader's own merge function gives it,
     "rng": [{"cpu": ...}, ...]}

The data position is that of the rows of the global batch, not of ranks: any number of data ranks
can go on from it. Random states belong to ranks, and are put back only where there are as many
ranks as before.
"""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.checkpoint.storage import TRAIN_STATE, read_json
from titan_moe.runtime.errors import RunError

DATA = "data"
RNG = "rng"

# From the data positions of all ranks, in rank order, that of all rows.
MergeData = Callable[[list[dict[str, Any]]], dict[str, Any]]


def gather_rank_states(state: dict[str, Any]) -> list[dict[str, Any]]:
    """On rank 0 every rank's `state` with its random state added; [] elsewhere. Collective."""
    mine = state | {RNG: get_random_state()}
    states: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, states, dst=0)
    return states or []


def merge_rank_states(states: list[dict[str, Any]], merge_data: MergeData) -> dict[str, Any]:
    """What train_state.json holds. All but "data" and random states is the same on all ranks."""
    common = {key: value for key, value in states[0].items() if key not in (DATA, RNG)}
    merged = {"common": common, RNG: [state[RNG] for state in states]}
    if DATA in states[0]:
        merged[DATA] = merge_data([state[DATA] for state in states])
    return merged


def read_train_state(folder: Path) -> dict[str, Any]:
    """What `merge_rank_states` gave. Raises RunError when it is missing or damaged."""
    state = read_json(folder / TRAIN_STATE)
    if missing := {"common", RNG} - state.keys():
        raise RunError(f"{folder / TRAIN_STATE} is damaged: it lacks {', '.join(sorted(missing))}")
    return state


def restore_random_state(train_state: dict[str, Any]) -> bool:
    """Put back this rank's random state; returns False if there are not as many ranks as before."""
    if len(train_state[RNG]) != dist.get_world_size():
        return False
    set_random_state(train_state[RNG][dist.get_rank()])
    return True


def set_random_state(saved: dict[str, str]) -> None:
    """Put back what `get_random_state` gave."""
    torch.set_rng_state(_decode(saved["cpu"]))
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode(saved["cuda"]))


def get_random_state() -> dict[str, str]:
    """Of torch's generators on this rank, JSON-able."""
    state = {"cpu": _encode(torch.get_rng_state())}
    if torch.cuda.is_available():
        state["cuda"] = _encode(torch.cuda.get_rng_state())
    return state


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
