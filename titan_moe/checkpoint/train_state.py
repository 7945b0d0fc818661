"""train_state.json: everything of a run that is no tensor.

    {"common": {"step": 10, ...},
     "data": {"<global row>": position, ...},
     "rng": [{"cpu": ...}, ...]}

The data position is kept per row of the global batch, not per rank: any number of data ranks can go
on from it. Random states belong to ranks, and are put back only where there are as many ranks as
before.
"""

import base64
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.checkpoint.storage import read_json
from titan_moe.runtime.errors import RunError

DATA = "data"
TRAIN_STATE = "train_state.json"


def gather_train_state(state: dict[str, Any]) -> dict[str, Any]:
    """All ranks' state as one JSON object on rank 0, {} elsewhere; collective.

    `state` is this rank's: under "data" whatever its loader must remember, as nested mappings keyed
    by strings of which each rank may hold only some; the rest is the same on all ranks.
    """
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((state.get(DATA, {}), _random_state()), everyone, dst=0)
    if everyone is None:
        return {}
    return {
        "common": {key: value for key, value in state.items() if key != DATA},
        DATA: reduce(_union, [data for data, _ in everyone]),
        "rng": [rng for _, rng in everyone],
    }


def read_train_state(folder: Path) -> dict[str, Any]:
    """What `gather_train_state` gave rank 0. Raises RunError when it is missing or damaged."""
    state = read_json(folder / TRAIN_STATE)
    if missing := {"common", DATA, "rng"} - state.keys():
        raise RunError(f"{folder / TRAIN_STATE} is damaged: it lacks {', '.join(sorted(missing))}")
    return state


def restore_random_state(train_state: dict[str, Any]) -> bool:
    """Put back this rank's random state; returns False if there are not as many ranks as before."""
    if len(train_state["rng"]) != dist.get_world_size():
        return False
    saved = train_state["rng"][dist.get_rank()]
    torch.set_rng_state(_decode(saved["cpu"]))
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode(saved["cuda"]))
    return True


def _random_state() -> dict[str, str]:
    state = {"cpu": _encode(torch.get_rng_state())}
    if torch.cuda.is_available():
        state["cuda"] = _encode(torch.cuda.get_rng_state())
    return state


def _union(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """Union of nested mappings. What two ranks both hold must be equal."""
    merged = dict(left)
    for key, value in right.items():
        if key not in merged:
            merged[key] = value
        elif isinstance(value, dict) and isinstance(merged[key], dict):
            merged[key] = _union(merged[key], value)
        else:
            assert merged[key] == value, f"ranks disagree about the data position of {key!r}"
    return merged


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
