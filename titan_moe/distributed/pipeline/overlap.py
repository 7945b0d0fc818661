"""DualPipeV's pairs: the forward of one chunk and the backward of another take turns, so that one
computes while the other's rows travel.

The order is that of arXiv 2412.19437, section 3.2.1. Both halves run on this rank's one compute
stream; what overlaps are their exchanges, which NCCL runs on a stream (gloo in a thread) of its
own. The halves are two threads of which one runs at a time: a half that has started an exchange of
rows hands over, and gets its turn back before it waits. Who runs when follows from the numbers of
exchanges in either half alone, which the ranks of an `ep` group share, so all of them start the
same collectives in the same order.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining.schedules import (
    OVERLAP_F_B,
    _PipelineScheduleRuntime,
    _wait_batch_p2p,
)

from titan_moe.distributed.collectives import OverlapHook

_FORWARD, _BACKWARD = "forward", "backward"
_OTHER = {_FORWARD: _BACKWARD, _BACKWARD: _FORWARD}


class _AbandonedError(Exception):
    """The other half failed."""


class Alternation(OverlapHook):
    """Two halves that take turns; the overlap hook of the dispatchers that they run through.

    The forward runs in the caller's thread and begins; the backward in one that is kept, on the
    caller's device. Where autograd runs the backward's nodes in another thread (CUDA), those wait
    for their turn there. Outside of `run`, and once a half has ended, no thread waits for a turn.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._changed = threading.Condition()
        self._turn = _FORWARD
        self._running: set[str] = set()
        self._error: BaseException | None = None
        self._thread = ThreadPoolExecutor(1, "backward of an overlapped pair")

    def run(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        """Run both to their ends; raises what the first that failed raised."""
        self._turn, self._running = _FORWARD, {_FORWARD, _BACKWARD}
        self._error = None
        other = self._thread.submit(self._backward_half, backward)
        self._half(_FORWARD, forward)
        other.result()
        if self._error is not None:
            raise self._error

    def in_forward(self) -> None:
        self._hand_over(_FORWARD)

    def in_backward(self) -> None:
        self._hand_over(_BACKWARD)

    def _backward_half(self, work: Callable[[], None]) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # Each thread has a device of its own.
        self._half(_BACKWARD, work)

    def _half(self, side: str, work: Callable[[], None]) -> None:
        try:
            with self._changed:
                self._await_turn(side)
            work()
        except BaseException as error:
            self._error = self._error or error  # Of two, the second was abandoned.
        finally:
            with self._changed:
                self._running.discard(side)
                self._turn = _OTHER[side]
                self._changed.notify_all()

    def _hand_over(self, side: str) -> None:
        if _OTHER[side] not in self._running:
            return
        with self._changed:
            self._turn = _OTHER[side]
            self._changed.notify_all()
            self._await_turn(side)

    def _await_turn(self, side: str) -> None:
        self._changed.wait_for(lambda: self._turn == side)
        if self._error is not None:
            raise _AbandonedError(f"the {_OTHER[side]} of the pair failed")


def overlap_pairs(schedule: _PipelineScheduleRuntime, alternation: Alternation) -> None:
    """Let a schedule's OVERLAP_F_B actions alternate between their halves.

    The halves do what torch 2.11 and 2.13 do for FORWARD and FULL_BACKWARD in
    `_PipelineScheduleRuntime`, which offers them as no function. What was sent to either is waited
    for first: the pair as a whole is scheduled after both have been sent.
    """
    stages = {stage.stage_index: stage for stage in schedule._stages}

    def run_pair(action: Any, ctx: Any) -> None:
        forward, backward = action.sub_actions
        for half in (forward, backward):
            schedule._assert_unsharded(stages[half.stage_index])
        _receive(schedule.fwd_recv_ops, forward)
        _receive(schedule.bwd_recv_ops, backward)
        alternation.run(
            lambda: _forward(schedule, stages, forward, ctx),
            lambda: _backward(schedule, stages, backward),
        )

    schedule.register_custom_function(OVERLAP_F_B, run_pair)


def _receive(receiving: dict[tuple[int, int], Any], half: Any) -> None:
    """Nothing is received at the ends, and where a V turns."""
    works = receiving.pop((half.stage_index, half.microbatch_index), None)
    if works is not None:
        _wait_batch_p2p(works)


def _forward(schedule: Any, stages: dict[int, Any], half: Any, context: Any) -> None:
    index, microbatch = half.stage_index, half.microbatch_index
    output: Tensor = stages[index].forward_one_chunk(
        microbatch,
        context.arg_mbs[microbatch],
        context.kwarg_mbs[microbatch],
        save_forward_output=False,
    )
    schedule._maybe_compute_loss(stages[index], output, context.target_mbs, microbatch)
    if index + 1 in stages:
        stages[index + 1].set_local_fwd_input(output, microbatch)


def _backward(schedule: Any, stages: dict[int, Any], half: Any) -> None:
    index, microbatch = half.stage_index, half.microbatch_index
    schedule.backward_counter[index] += 1
    stages[index].backward_one_chunk(
        microbatch,
        loss=schedule._maybe_get_loss(stages[index], microbatch),
        full_backward=True,
        last_backward=schedule.backward_counter[index] == schedule._n_microbatches,
    )
    if index - 1 in stages:
        stages[index - 1].set_local_bwd_input(
            stages[index].get_local_bwd_output(microbatch), microbatch
        )
