"""What an explanation calls unusual, in which order it names parts, and how few it leaves out."""

import math
from pathlib import Path

import pytest
import torch

from titan_moe.config.job_config import JobConfig
from titan_moe.data.batch import Batch
from titan_moe.data.tokenizer import ByteTokenizer
from titan_moe.debug.why.explain import Study, in_order
from titan_moe.debug.why.findings import Figures, Part
from titan_moe.debug.why.pieces import Sums
from titan_moe.debug.why.run import Decisions, Run, decisions
from titan_moe.debug.why.usual import Measured, Usual, notes, usual

LIMIT = Figures(3.0, 2.0)
HELD_TO = Usual(Figures(2.5, 1.0), "steps", LIMIT)


def _part(name: str, *, share: float, loss: float = 2.0, document: int | None = 0) -> Part:
    return Part(int(name), document, name, 10, loss, abs(share), share)


@pytest.mark.parametrize(
    ("now", "names"),
    [
        (Figures(2.0, 9.0), "2031"),
        (Figures(math.nan, math.nan), "2031"),
        (Figures(9.0, 1.0), "2103"),  # The loss alone: by loss, and what has none comes last.
    ],
)
def test_the_worst_comes_first(now: Figures, names: str):
    parts = [
        _part("0", share=0.4),
        _part("1", share=-0.1, loss=4.0),
        _part("2", share=math.nan, loss=math.nan),
        _part("3", share=0.2, loss=math.nan, document=None),
    ]
    assert "".join(part.name for part in in_order(parts, now, HELD_TO)) == names


class _Counted:
    """Pieces of a step of 40 documents, of which the first `bad` are to blame."""

    def __init__(self, bad: int) -> None:
        self.bad = bad
        self.tried: list[int] = []

    def sums(self, batches: list[Batch]) -> Sums:
        labels = torch.cat([batch.labels_BS for batch in batches])
        left = int((labels[: self.bad] != -100).sum())
        self.tried.append(int((labels == -100).sum()))
        norm = 5.0 if left else 1.0
        return Sums(2.0 * len(labels), len(labels), {"a": [norm * len(labels)]}, {})

    def keep(self) -> None:
        """Nothing."""


@pytest.mark.parametrize(("bad", "tries"), [(1, [1]), (3, [1, 2, 4, 3]), (6, [1, 2, 4, 8, 6, 5])])
def test_as_few_documents_as_needed_are_left_out(bad: int, tries: list[int]):
    ones = torch.ones(40, 1, dtype=torch.int64)
    batch = Batch(ones, ones, 0 * ones, [["a"]] * 40)
    pieces = _Counted(bad)
    study = Study(pieces, [batch], ByteTokenizer())  # type: ignore[arg-type]
    parts = [_part(str(number), share=1 / (number + 1)) for number in range(40)]
    found, needed = study.without_documents(parts, LIMIT)
    assert needed == bad and pieces.tried[1:] == tries
    assert [each.documents for each in found] == sorted(tries)


def _run(losses: list[float | None], **keys: object) -> Run:
    logged = {
        step: {"step": step, "loss": loss, "grad_norm": loss and 1.0, **keys}
        for step, loss in enumerate(losses, 1)
    }
    return Run(Path("x"), len(losses), JobConfig(), None, logged)


def test_a_step_is_held_to_the_logged_steps_before_it():
    found = usual(_run([4.0, None, 2.0, 2.1, 9.0]), {}, None)
    assert found.figures == Figures(2.1, 1.0) and found.of == "logged steps 1 to 4"
    assert found.limit.norm == 1.5 and 2.1 < found.limit.loss < 9.0
    falling = usual(_run([9.0 - step / 4 for step in range(20)]), {}, None)
    assert falling.figures.loss == 5.0 and falling.limit.loss == 5.5
    assert usual(_run([9.0]), {}, None).limit == Figures(math.inf, math.inf)
    following = Measured(Figures(2.0, 3.0), {}, {})
    assert usual(_run([9.0]), {}, following).of == "the next batch"


def test_what_is_not_the_run_s_step_says_so():
    run = _run([2.0, 2.0], data=17)
    assert notes(run, {1: Figures(2.0, 1.0), 2: Figures(2.0, 1.0)}, 17) == []
    (other,) = notes(run, {1: Figures(2.5, 1.0), 2: Figures(2.0, 1.0)}, 17)
    assert other.startswith("step 1 comes out otherwise: loss 2.5 here, 2 in the log")
    (data,) = notes(run, {2: Figures(2.0, 1.0)}, 18)
    assert "the run read other sequences in step 2" in data
    (lost,) = notes(_run([2.0, math.nan]), {2: Figures(2.0, 1.0)}, 0)
    assert "in the log" in lost


def _event(step: int, decision: str, checkpoint: int | None = None) -> dict[str, object]:
    return {"step": step, "decision": decision, "checkpoint": checkpoint}


def test_what_the_run_left_out_is_known_from_its_decisions():
    skip, back, again = _event(5, "skip"), _event(9, "roll_back", 4), _event(9, "roll_back", 4)
    other, later, stop = _event(20, "roll_back", 12), _event(6, "skip"), _event(8, "stop")
    assert decisions([], 4, 7) == Decisions()
    assert decisions([skip], 4, 7) == Decisions(0, frozenset({5}))
    # What was skipped before the run went back was made again.
    assert decisions([skip, back, later, other], 4, 7) == Decisions(5, frozenset({6}))
    assert decisions([skip, back, again, later], 4, 7) == Decisions(10, frozenset({6}))
    # A step that it went back from, or stopped in, is made again as it was.
    assert decisions([skip, back, later], 4, 9) == Decisions(0, frozenset({5}), back)
    assert decisions([back, later, again, skip], 4, 9) == Decisions(5, frozenset({6}), again)
    assert decisions([skip, stop], 4, 8) == Decisions(0, frozenset({5}), stop)
