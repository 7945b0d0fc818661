"""RoutingDiff counted by hand."""

import json
from pathlib import Path

import numpy as np
import pytest

from titan_moe.config.errors import ConfigError
from titan_moe.routing.record import Dims, RecordWriter, Routing, Tokens, name_rows, start_record
from titan_moe.runtime.errors import RunError
from titan_moe.verify.compare.routing_diff import routing_diff

DIMS = Dims(["layers.0", "layers.1"], 8, 2)
EXPERTS = np.array([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], dtype=np.uint16)
WEIGHTS = np.array([[[0.5, 0.25], [0.5, 0.5]], [[1.0, 0.0], [0.5, 0.5]]], dtype=np.float32)
TOKENS = Tokens(name_rows([11, 22]), np.array([0, 1]))


def record(folder: Path, steps: dict[int, list[tuple]], tokens: Tokens = TOKENS) -> Path:
    """Layer by layer, the experts and weights of each step."""
    start_record(folder, DIMS, after=0)
    writer = RecordWriter(folder, rank=0, world_size=1, limit_gb=1)
    for step, layers in steps.items():
        named = zip(DIMS.layers, layers, strict=True)
        writer.write(step, tokens, {name: Routing(*both) for name, both in named})
    return folder


def test_changes_and_drift(tmp_path: Path) -> None:
    same = EXPERTS, WEIGHTS
    other = EXPERTS.copy(), WEIGHTS.copy()
    other[0][0, 0] = [1, 6]  # One changed, the other in another place with another weight.
    other[1][0, 0] = [0.5, 0.5]
    both = EXPERTS.copy(), WEIGHTS
    both[0][1, 1] = [0, 1]
    turned = EXPERTS[..., ::-1].copy(), WEIGHTS[..., ::-1].copy()
    ours = record(tmp_path / "a", {1: [same, same], 2: [same, same], 3: [same, same]})
    theirs = record(tmp_path / "b", {1: [turned, same], 2: [other, both]})
    diff = routing_diff(ours, theirs)
    assert diff.steps == [1, 2] and diff.layers == DIMS.layers
    assert diff.changed_SL.tolist() == [[0, 0], [1, 2]]
    assert diff.slots_SL.tolist() == [[8, 8], [8, 8]]
    assert diff.share_SL.tolist() == [[0, 0], [1 / 8, 2 / 8]]
    # Expert 1 weighed 0.25, now 0.5, among seven slots that stayed.
    assert diff.drift_SL.tolist() == [[0, 0], [pytest.approx(1 / 7), 0]]
    assert diff.line() == (
        "3 of 32 expert choices differ in steps 1 to 2 (0.094 of all), the first in step 2, most "
        "in layers.1 (0.12); the others' weights differ by 3.6e-02 on average"
    )
    assert json.loads(json.dumps(diff.as_json()))["flipped"] == [[0, 0], [1, 2]]
    back = routing_diff(theirs, ours)
    assert back.changed_SL.tolist() == diff.changed_SL.tolist()


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    same = EXPERTS, WEIGHTS
    ours = record(tmp_path / "a", {1: [same, same]})
    with pytest.raises(ConfigError, match=r"have no step in common"):
        routing_diff(ours, record(tmp_path / "later", {2: [same, same]}))
    half = EXPERTS[:1], WEIGHTS[:1]
    fewer = record(tmp_path / "fewer", {1: [half, half]}, Tokens(TOKENS.rows[:1], np.array([0, 1])))
    for pair in ((ours, fewer), (fewer, ours)):
        with pytest.raises(RunError, match=r"do not have the same tokens"):
            routing_diff(*pair)
    rows = Tokens(name_rows([11, 33]), np.array([0, 1]))
    with pytest.raises(RunError, match=r"no routing of layers.0 for the row 00000021"):
        routing_diff(ours, record(tmp_path / "rows", {1: [same, same]}, rows))
    start_record(tmp_path / "model", Dims(DIMS.layers, 16, 2), after=0)
    with pytest.raises(ConfigError, match=r"num_experts=16, this one has 8"):
        routing_diff(ours, tmp_path / "model")
    with pytest.raises(ConfigError, match=r"there is no routing record"):
        routing_diff(ours, tmp_path / "nowhere")


def test_weights_that_are_no_numbers_are_infinitely_far(tmp_path: Path) -> None:
    same, broken = (EXPERTS, WEIGHTS), (EXPERTS, WEIGHTS.copy())
    broken[1][0, 0, 0] = np.nan
    ours = record(tmp_path / "a", {1: [same, same]})
    theirs = record(tmp_path / "b", {1: [same, broken]})
    for pair in ((ours, theirs), (theirs, ours), (theirs, theirs)):
        diff = routing_diff(*pair)
        assert diff.drift_SL.tolist() == [[0, np.inf]]
        assert "weights differ by inf on average" in diff.line()


def test_records_without_a_choice_are_refused(tmp_path: Path) -> None:
    no_row = Tokens([], np.array([0, 1]))
    nothing = EXPERTS[:0], WEIGHTS[:0]
    empty = [record(tmp_path / name, {1: [nothing] * 2}, no_row) for name in "ab"]
    with pytest.raises(RunError, match=r"do not have the same tokens, or none"):
        routing_diff(*empty)
    for name in "cd":
        start_record(tmp_path / name, Dims([], 8, 2), after=0)
        RecordWriter(tmp_path / name, rank=0, world_size=1, limit_gb=1).write(1, TOKENS, {})
    with pytest.raises(ConfigError, match=r"have no step in common, or no MoE layer"):
        routing_diff(tmp_path / "c", tmp_path / "d")
