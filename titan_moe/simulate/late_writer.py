"""A checkpoint's writer without a process of its own, which answers later on some ranks than on
others, and always alike."""

from pathlib import Path

from titan_moe.checkpoint.background import BackgroundSaves
from titan_moe.checkpoint.writer import Finish, WriterPlan, finish, memory_of, write_own
from titan_moe.runtime.child_process import ChildProcess


class LateWriter(ChildProcess):
    """Writes at once what it is asked to. A rank of an odd number, and rank 0 when it finishes a
    checkpoint, hears of it when it asks for the second time."""

    def __init__(self, function: str, *, handles: tuple[int, ...] = ()) -> None:
        self._answer: Exception | None = None
        self._asked_in_vain = 0

    def send(self, request: WriterPlan | Path | Finish) -> None:
        if isinstance(request, WriterPlan):
            self._plan, self._memory = request, memory_of(request)
            return
        self._answer = None
        self._asked_in_vain = 1 if isinstance(request, Finish) else self._plan.rank % 2
        try:
            if isinstance(request, Finish):
                assert self._plan.finish is not None
                finish(self._plan.finish, request)
            else:
                write_own(self._plan, self._memory, request)
        except Exception as error:  # As the process does.
            self._answer = error

    def answered(self, seconds: float) -> bool:
        self._asked_in_vain -= 1
        return self._asked_in_vain < 0

    def receive(self) -> Exception | None:
        return self._answer

    def close(self) -> int:
        return 0


class LateSaves(BackgroundSaves):
    """Saves whose writers are late by rank."""

    writer_process = LateWriter
