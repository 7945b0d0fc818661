"""Captures made by hand: what is put together, what is named, and what is left to rounding."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from titan_moe.cli.main import main
from titan_moe.config.errors import ConfigError
from titan_moe.training.capture.records import (
    NUMBERS,
    TENSOR,
    TOKENS,
    Place,
    Records,
    Sketches,
    token_keys,
)
from titan_moe.training.capture.sketch import sketch_box, sketch_rows
from titan_moe.verify.compare import bisect as bisection
from titan_moe.verify.compare.bisect import StepFinding
from titan_moe.verify.localize.capture_reader import Capture, read_capture
from titan_moe.verify.localize.localize import locate, uncompared

SEQUENCES, LENGTH, WIDTH = [11, 12], 6, 5
KEYS = token_keys(torch.tensor(SEQUENCES), torch.arange(LENGTH)).flatten()
OUTPUT = Place("forward", "layers.0.attention.wo", "output")
NEXT = Place("forward", "layers.0", "output")
GRADIENT = Place("gradient", "norm", "gradient of weight")
SCORES = Place("forward", "layers.0.moe.router", "scores")
CHOICE = Place("forward", "layers.0.moe.router", "choice")
LAYOUT = {"dp_shard": 1, "cp": 1, "tp": 1}


def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return {
        "output": draw(len(KEYS), WIDTH),
        "next": draw(len(KEYS), WIDTH),
        "weight": draw(8),
        "scores": draw(len(KEYS), 4).sigmoid(),
        "loss": torch.tensor([3.0], dtype=torch.float64),
    }


def write(folder: Path, ranks: list[dict[str, torch.Tensor]], margin: float = 0.5) -> Capture:
    """Each rank has its chunk of the tokens, and a copy of all else."""
    for rank, held in enumerate(ranks):
        records, zero = Records(), torch.zeros(1, dtype=torch.int64)
        own = torch.arange(len(KEYS)).tensor_split(len(ranks))[rank]
        hot = torch.nn.functional.one_hot(held["scores"].argmax(1), 4)
        margins = torch.full((len(KEYS), 1), margin, dtype=torch.float64)
        by_token = {OUTPUT: held["output"], NEXT: held["next"], SCORES: held["scores"]}
        by_token |= {CHOICE: hot, CHOICE._replace(tensor="margin"): margins}
        for place, x in by_token.items():
            records.add(place, 0, Sketches(TOKENS, KEYS[own], sketch_rows(x[own])))
        loss = Sketches(NUMBERS, zero, held["loss"][:, None])
        records.add(Place("loss", "", "loss"), 0, loss)
        weight = sketch_box(held["weight"], (slice(0, 8),))[None]
        records.add(GRADIENT, 0, Sketches(TENSOR, zero, weight))
        facts = {"step": 1, "rank": rank, "world_size": len(ranks), "rows": SEQUENCES}
        facts |= {"layout": LAYOUT | {"dp_shard": len(ranks)}, "compute_dtype": "float64"}
        records.save(folder / f"rank-{rank:05d}.pt", facts)
    return read_capture(folder)


@pytest.fixture
def baseline(tmp_path: Path) -> Capture:
    return write(tmp_path / "baseline", [values()])


def test_captures_of_three_ranks_equal_that_of_one(baseline: Capture, tmp_path: Path):
    assert locate(baseline, write(tmp_path / "two", [values()] * 3)) is None


def test_finding_names_the_first_place_with_its_tokens_and_norms(baseline: Capture, tmp_path: Path):
    changed = values()
    changed["output"][8:11] *= 2
    changed["next"] += 1
    finding = locate(baseline, write(tmp_path / "two", [changed, changed]))
    assert finding is not None and [each.place for each in finding.wrong] == [OUTPUT, NEXT]
    norm = values()["output"][8:11].norm().item()
    assert finding.first.norms == pytest.approx((norm, 2 * norm), rel=0.5)
    assert finding.first.ratio == pytest.approx(2)
    said = "\n".join(finding.lines())
    assert "layers.0.attention.wo, output (forward)" in said and "2 of 4 places" in said
    assert "sequence 1 (0000000c): 3, first at position 2" in said and "exactly 2" in said


def test_a_control_run_says_what_rounding_may_do(baseline: Capture, tmp_path: Path):
    far, further = values(), values()
    far["output"] *= 1 + 1e-6
    further["output"] *= 1 + 1e-3
    control = write(tmp_path / "control", [far])
    near = write(tmp_path / "near", [far])
    assert locate(baseline, near) is not None
    assert locate(baseline, near, [control]) is None
    assert locate(baseline, write(tmp_path / "further", [further]), [control]) is not None


def test_copies_that_differ_between_ranks_are_named(baseline: Capture, tmp_path: Path):
    other = values()
    other["weight"] *= 1.5
    candidate = write(tmp_path / "two", [values(), other])
    for controls in ([], [candidate]):
        finding = locate(baseline, candidate, controls)
        assert finding is not None and finding.first.place == GRADIENT
        assert "ranks hold other values" in "\n".join(finding.lines())


@pytest.mark.parametrize("name", ["output", "weight", "loss"])
def test_a_control_run_of_nan_makes_no_nan_right(name: str, baseline: Capture, tmp_path: Path):
    broken = values()
    broken[name].flatten()[0] = torch.nan
    control = write(tmp_path / "control", [broken])
    assert locate(baseline, write(tmp_path / "same", [values()]), [control]) is None
    finding = locate(baseline, write(tmp_path / "two", [broken]), [control])
    assert finding is not None and finding.first.place.tensor in (name, f"gradient of {name}")
    assert not finding.first.copies


def without(capture: Capture, *places: Place) -> Capture:
    return replace(capture, places={p: t for p, t in capture.places.items() if p not in places})


def test_places_of_one_run_are_named_with_their_number(baseline: Capture):
    assert uncompared(baseline, baseline) == []
    (line,) = uncompared(baseline, without(baseline, OUTPUT, GRADIENT))
    assert line.startswith("not compared: 2 of its 7 places only the baseline has: ")
    assert "layers.0.attention.wo, output (forward)" in line and "norm, gradient of weight" in line
    (line,) = uncompared(without(baseline, SCORES), baseline)
    assert "1 of its 7 places only the candidate has: layers.0.moe.router, scores" in line


def test_captures_without_a_common_place_are_not_called_equal(baseline: Capture):
    nothing = replace(baseline, places={})
    assert uncompared(nothing, nothing) == ["not compared: the runs have no place in common"]
    assert "no place in common" in uncompared(baseline, nothing)[-1]
    empty = replace(baseline.places[OUTPUT], keys=np.zeros(0), values=np.zeros((0, 3)))
    hollow = replace(baseline, places={OUTPUT: empty})
    assert uncompared(hollow, hollow) == ["not compared: the runs have no place in common"]


def test_only_what_was_compared_is_said_to_be_equal(
    baseline: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    found = StepFinding(7, None, uncompared=uncompared(baseline, without(baseline, NEXT)))
    monkeypatch.setattr(bisection, "bisect", lambda *_: [found])
    words = ["verify", "localize", "--out", str(tmp_path), "--config", "configs/debug/compare.toml"]
    assert main([*words, "--candidate", "ranks=1"]) == 1
    said = capsys.readouterr().out
    assert "step 7: nothing differs beyond rounding where both runs have a place" in said
    assert "not compared: 1 of its 7 places only the baseline has: layers.0, output" in said


@pytest.mark.parametrize(("margin", "is_tie"), [(1e-12, True), (0.5, False)])
def test_another_choice_is_a_tie_or_a_mistake(tmp_path: Path, margin: float, is_tie: bool):
    ours, theirs = values(), values()
    ours["scores"][4, :2] = torch.tensor([0.99, 0.99 - 1e-13], dtype=torch.float64)
    theirs["scores"][4, :2] = torch.tensor([0.99 - 1e-13, 0.99], dtype=torch.float64)
    baseline = write(tmp_path / "baseline", [ours], margin=margin)
    finding = locate(baseline, write(tmp_path / "candidate", [theirs], margin=margin))
    assert finding is not None and finding.first.place == CHOICE and bool(finding.tie) == is_tie
    said = "\n".join(finding.lines())
    assert "sequence 0 (0000000b): 1, first at position 4" in said and ("a tie" in said) == is_tie


@pytest.mark.parametrize("only", ["baseline", "candidate", "neither"])
def test_another_choice_without_scores_is_no_tie(tmp_path: Path, only: str):
    ours, theirs = values(), values()
    theirs["scores"][4] = ours["scores"][4].flip(0)
    baseline = write(tmp_path / "baseline", [ours], margin=1e-12)
    candidate = write(tmp_path / "candidate", [theirs], margin=1e-12)
    if only != "baseline":
        baseline = without(baseline, SCORES)
    if only != "candidate":
        candidate = without(candidate, SCORES)
    finding = locate(baseline, candidate)
    assert finding is not None and finding.first.place == CHOICE and not finding.tie


def test_capture_that_lacks_a_rank_is_refused(tmp_path: Path):
    write(tmp_path, [values()] * 2)
    (tmp_path / "rank-00001.pt").unlink()
    with pytest.raises(ConfigError, match="1 files of 2 ranks"):
        read_capture(tmp_path)
