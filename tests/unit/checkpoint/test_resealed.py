"""A train_state.json whose values were changed: read, or refused in one line that names the key."""

import base64
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fuzz.damage import ODD_VALUES, places
from tests.fuzz.verdict import refused
from titan_moe.bad_steps import BadSteps
from titan_moe.checkpoint.train_state import (
    get_random_state,
    merge_rank_states,
    read_train_state,
    set_random_state,
)
from titan_moe.config.job_config import Training
from titan_moe.runtime.errors import RunError

_STEP = 5


def _saved() -> dict[str, Any]:
    """The contents of a checkpoint's train_state.json, but for the data position."""
    common = {"step": _STEP, "tokens": 320, "bad_steps": {"norms": [1.5, 2.0], "skipped": 1}}
    state: dict[str, Any] = {**common, "data": {}, "rng": get_random_state()}
    return json.loads(json.dumps(merge_rank_states([state], lambda states: states[0])))


def _go_on(folder: Path) -> None:
    """Resume as a run does. Raises RunError."""
    saved = read_train_state(folder, _STEP)
    steps = BadSteps(Training(spike_factor=2.0))
    steps.load_state(saved["common"])
    steps.is_spike(3.0)
    if len(saved["rng"]) == 1:  # Else of another number of ranks: they start fresh.
        set_random_state(saved["rng"][0])
    json.dumps([steps.state(), saved["common"]["tokens"] + 1])


def _write(folder: Path, state: dict[str, Any]) -> None:
    """Without digests: a program that changes a file can write its digest too."""
    (folder / "train_state.json").write_text(json.dumps(state))


def _changed(state: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The state with each value replaced by each odd one, and without it."""
    for number, (_, key) in enumerate(places(state)):
        for odd in [*ODD_VALUES, _REMOVED]:
            other = copy.deepcopy(state)
            inside: Any = list(places(other))[number][0]
            inside[key] = odd
            if odd is _REMOVED:
                del inside[key]
            yield f"{key} is {str(odd)[:40]}", other


_REMOVED = object()


def test_every_value_of_a_train_state(tmp_path: Path) -> None:
    state = _saved()
    _write(tmp_path, state)
    _go_on(tmp_path)
    before, counts = torch.get_rng_state(), {"read": 0, "refused": 0}
    for what, changed in _changed(state):
        _write(tmp_path, changed)
        try:
            _go_on(tmp_path)
            counts["read"] += 1
        except RunError as error:
            assert refused([str(error)]).kind == "refused", (what, error)
            assert "train_state.json" in str(error) or "the checkpoint" in str(error), what
            counts["refused"] += 1
        except Exception as error:
            raise AssertionError(f"{what}: {error!r}") from error
    torch.set_rng_state(before)
    assert counts["refused"] > 100


@pytest.mark.parametrize("state", ["", "AAAA", base64.b64encode(bytes(5056)).decode()])
def test_a_random_state_that_is_none_is_refused(tmp_path: Path, state: str) -> None:
    saved = _saved()
    saved["rng"][0]["cpu"] = state
    _write(tmp_path, saved)
    with pytest.raises(RunError, match=r"train_state.json is damaged: rng.0 is no state"):
        read_train_state(tmp_path)


def test_the_key_is_named(tmp_path: Path) -> None:
    saved = _saved()
    saved["common"]["bad_steps"]["norms"][1] = "2.0"
    _write(tmp_path, saved)
    with pytest.raises(RunError, match=r"train_state.json is damaged: common.bad_steps.norms.1: "):
        read_train_state(tmp_path)
    saved["common"] = {"step": _STEP + 1, "tokens": 1}
    _write(tmp_path, saved)
    with pytest.raises(RunError, match=f"train_state.json is damaged: common.step is not {_STEP}"):
        read_train_state(tmp_path, _STEP)
