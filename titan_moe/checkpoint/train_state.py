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
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import ConfigDict, Field, ValidationError
from torch import Tensor

from titan_moe.checkpoint.storage import TRAIN_STATE, read_json
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.records import Count, StrictRecord, first_problem

DATA = "data"
RNG = "rng"
_CUDA_STATE = 16  # Bytes: seed and offset.

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


class _BadSteps(StrictRecord):
    """As bad_steps.BadSteps.state gives it."""

    norms: list[Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(default_factory=list)
    skipped: Count = 0


class _Common(StrictRecord):
    step: Count
    tokens: Count
    bad_steps: _BadSteps = _BadSteps()


class _RandomState(StrictRecord):
    model_config = ConfigDict(extra="forbid")

    cpu: str
    cuda: str = ""


class _TrainState(StrictRecord):
    """All but the data position, which data/position.py knows."""

    common: _Common
    rng: list[_RandomState]
    data: dict[str, Any]


def read_train_state(folder: Path, step: int | None = None) -> dict[str, Any]:
    """What `merge_rank_states` gave. Raises RunError when it is missing, damaged, or of another
    step than the manifest's `step`."""
    state = read_json(folder / TRAIN_STATE)
    try:
        _TrainState.model_validate(state)
    except ValidationError as error:
        raise RunError(f"{folder / TRAIN_STATE} is damaged: {first_problem(error)}") from None
    if step is not None and state["common"]["step"] != step:
        raise RunError(f"{folder / TRAIN_STATE} is damaged: common.step is not {step}")
    for rank, saved in enumerate(state[RNG]):
        _check_random_state(saved, f"{folder / TRAIN_STATE} is damaged: {RNG}.{rank}")
    return state


def _check_random_state(saved: dict[str, str], where: str) -> None:
    """A generator that is thrown away says whether a state is one."""
    try:
        torch.Generator().set_state(_decode(saved["cpu"]))
        good = "cuda" not in saved or len(_decode(saved["cuda"])) == _CUDA_STATE
    except (ValueError, RuntimeError, TypeError):
        good = False
    if not good:
        raise RunError(f"{where} is no state of a generator")


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
