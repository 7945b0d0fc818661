"""BadSteps finds spikes, and decides about steps that are not finite."""

import json
import math
from collections.abc import Iterable

from titan_moe.config.job_config import Training
from titan_moe.training.bad_steps import FEWEST, MOST_SKIPPED, WINDOW, BadSteps, Decision
from titan_moe.training.train_step import StepResult


def result(norm: float, *, num_targets: int = 8) -> StepResult:
    return StepResult(2.0, norm, num_targets, None)


def watching(norms: Iterable[float] = (), **keys) -> BadSteps:
    """Returns a BadSteps after steps of these norms, all of which made their update."""
    bad_steps = BadSteps(Training(**{"spike_factor": 10, **keys}))
    for norm in norms:
        bad_steps.accept(result(norm))
    return bad_steps


def decide(bad_steps: BadSteps, step: int, norm: float = 100.0) -> Decision:
    place = "" if math.isfinite(norm) else "first seen in the output of x"
    return bad_steps.decide(step, result(norm), place)


LEVEL = [1.0] * FEWEST


def test_no_spike_without_a_factor_or_before_enough_norms() -> None:
    off = watching([1.0] * WINDOW, spike_factor=None)
    assert not off.is_spike(1e30) and off.state() == {}
    early = watching([1.0] * (FEWEST - 1))
    assert not early.is_spike(1e30)
    early.accept(result(1.0))
    assert early.is_spike(1e30)


def test_spike_limit_is_the_factor_times_the_median() -> None:
    bad_steps = watching([1.0] * 8 + [2.0] * 7 + [50.0])
    assert not bad_steps.is_spike(15.0)
    assert bad_steps.is_spike(math.nextafter(15.0, 16.0))


def test_spike_limit_follows_the_last_norms() -> None:
    bad_steps = watching([1.0] * WINDOW + [5.0] * (WINDOW // 2))
    assert not bad_steps.is_spike(30.0) and bad_steps.is_spike(31.0)
    bad_steps.accept(result(5.0))
    assert not bad_steps.is_spike(50.0) and bad_steps.is_spike(51.0)


def test_steps_without_targets_do_not_count() -> None:
    bad_steps = watching(LEVEL)
    for _ in range(WINDOW):
        bad_steps.accept(result(0.0, num_targets=0))
    assert bad_steps.is_spike(11.0)
    assert not watching([0.0] * WINDOW).is_spike(1e-30)


def test_state_keeps_norms_and_skips() -> None:
    norms = [0.1 * (1 + step % 7) for step in range(90)]
    first = watching(norms[:70], on_spike="skip")
    decide(first, 71)
    second = watching(on_spike="skip")
    assert second.state() == {}
    second.load_state(json.loads(json.dumps({"step": 70, **first.state()})))
    assert second.state() == first.state() and second._skipped == 1
    for norm in norms[70:]:
        for each in (3.9, 4.1, 10 * norm):
            assert first.is_spike(each) == second.is_spike(each)
        first.accept(result(norm))
        second.accept(result(norm))
    assert first.state() == second.state()
    second.load_state({"step": 70})  # A checkpoint of before there was such a state.
    assert second.state() == {}


def test_stop_names_reason_and_remedy() -> None:
    decision = decide(watching([2.0] * 20), 21)
    assert decision.seen == (
        "step 21: a spike: gradient norm 100, 50 times the median 2 of the last 20 "
        "(training.spike_factor=10)"
    )
    assert decision.action == "stop"
    assert decision.remark.startswith("training.on_spike='skip' would")
    decision = decide(watching(), 1, math.nan)
    seen = "step 1: loss 2.0, gradient norm nan: first seen in the output of x"
    assert (decision.action, decision.seen) == ("stop", seen)
    assert decision.remark.startswith("training.on_nonfinite='skip' would")


def test_skipping_stops_after_too_many_in_a_row() -> None:
    bad_steps = watching(LEVEL, on_spike="skip", on_nonfinite="skip")
    for step in range(MOST_SKIPPED - 1):
        assert decide(bad_steps, step).action == "skip"
    bad_steps.accept(result(1.0))
    for step in range(MOST_SKIPPED):
        norm = math.nan if step % 2 else 100.0
        # A spike does not hide the next, and each kind has its policy.
        assert bad_steps.is_spike(100.0) and decide(bad_steps, step, norm).action == "skip"
    decision = decide(bad_steps, 40)
    assert decision.action == "stop" and "the 16 steps before it too" in decision.remark
    assert "training.on_spike='skip'" in decision.remark


def test_record_for_events() -> None:
    bad_steps = watching(LEVEL, on_spike="skip")
    decision = decide(bad_steps, 20)
    worst = [{"loss": 9.0, "targets": 63, "documents": ["c4/3"]}]
    record = bad_steps.record(result(100.0), decision, worst)
    assert record.pop("time").endswith("+00:00")
    assert record == {
        "event": "spike",
        "loss": 2.0,
        "grad_norm": 100.0,
        "median_grad_norm": 1.0,
        "decision": "skip",
        "line": f"{decision.seen}; {decision.remark}",
        "worst_sequences": worst,
    }
    off = watching(spike_factor=None)
    record = off.record(result(math.nan), decide(off, 1, math.nan), [])
    assert (record["event"], record["median_grad_norm"]) == ("nonfinite", None)
