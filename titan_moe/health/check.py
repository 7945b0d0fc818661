"""One rank's part in a check of all devices and connections, and rank 0's verdict.

A thread makes the checks. The main thread waits for the verdict in the store through which the
ranks met, and on rank 0 leads: it opens each stage for all ranks at once, collects what they found,
and gives up where a rank has not ended in time. Neither needs a collective, so that a rank that
hangs in one is named by those that do not.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from titan_moe.config.job_config import Comm
from titan_moe.debug.hang.records import default_store
from titan_moe.health import plan, probes
from titan_moe.health.plan import Stage
from titan_moe.health.probes import Operations, Result
from titan_moe.health.table import table
from titan_moe.health.verdict import Judge, Rank, outcomes
from titan_moe.runtime.device import describe_device
from titan_moe.runtime.errors import RunError, report
from titan_moe.runtime.launch import Launch
from titan_moe.runtime.process import Process, process_group
from titan_moe.runtime.stopping import attempt_folder

_POLL_S = 0.02
_GOODBYE_S = 5.0
_LONGEST_REASON = 200


@dataclass(frozen=True)
class Settings:
    """What a user may choose."""

    folder: Path
    """Where the disk is checked."""
    timeout_s: int = 120
    """Of a stage: all ranks' time for one check."""
    slow: float | None = None
    """Slower than this share of the others is named; None: verdict.GPU_SHARE and others."""
    memory_gib: float | None = None
    """Memory of a rank to test; None: probes.bytes_to_test."""


@dataclass(frozen=True)
class Health:
    """The end of a check, the same on all ranks."""

    problems: list[str]
    table: list[str]
    data: dict[str, Any]
    """All rates, by check, quantity and group."""


def check_health(
    process: Process, settings: Settings, operations: Operations, say: Callable[[str], None]
) -> Health:
    """Check everything on all ranks, and return the same verdict on each; collective.

    A thread may be left behind that hangs: end the process without its destructors. `say` is told
    of each stage, on rank 0.
    """
    stages = plan.plan(process.world_size // process.local_world_size, process.local_world_size)
    part = _Part(process, settings, operations, stages)
    part.store.set(f"rank/{process.rank}", json.dumps(asdict(_place(process))))
    threading.Thread(target=part.make_checks, name="checks", daemon=True).start()
    if process.is_main:
        part.lead(say)
    _wait_for(part.store, ["verdict"], None)
    health = Health(**json.loads(part.store.get("verdict")))
    part.store.set(f"left/{process.rank}", "")
    if process.is_main:
        # The store may end with this machine's torchrun, and that with this rank.
        others = [f"left/{rank}" for rank in range(process.world_size)]
        _wait_for(part.store, others, _GOODBYE_S)
    return health


def end_with_verdict(
    comm: Comm, settings: Settings, environment: Mapping[str, str], *, as_json: bool
) -> NoReturn:
    """A rank that torchrun has started: check, print on rank 0, and end the process with 0, or with
    1 and a record of what is wrong for the launcher."""
    launch = Launch.from_environment(environment)
    records = attempt_folder(environment)
    comm = comm.model_copy(
        update={
            "init_timeout_seconds": settings.timeout_s,
            # A connection that hangs must be met by its own check.
            "init_communicators_eagerly": False,
        }
    )
    say = partial(print, flush=True)
    try:
        # Left only by the end of the process: a thread may be inside a collective.
        with process_group(launch, comm, environment) as process:
            health = check_health(process, settings, Operations(), say)
            if process.is_main and as_json:
                print(json.dumps(health.data, indent=1), file=sys.__stdout__)
            elif process.is_main:
                print("\n".join(health.table))
            if health.problems and (records or process.is_main):
                report(launch.rank, health.problems, 1, expected=True, to=records)
            elif process.is_main:
                hosts = len({rank["host"] for rank in health.data["ranks"]})
                say(f"nothing is wrong: {process.world_size} rank(s) on {hosts} host(s)")
            _end(1 if health.problems else 0)
    except RunError as error:
        report(launch.rank, [str(error)], 1, expected=True, to=records)
        _end(1)


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    if sys.__stdout__ is not None:
        sys.__stdout__.flush()
    os._exit(code)


class _Part:
    """Both threads of a rank."""

    def __init__(
        self, process: Process, settings: Settings, operations: Operations, stages: list[Stage]
    ) -> None:
        self.store: dist.Store = _store()
        self._process, self._settings, self._stages = process, settings, stages
        self._operations = operations

    def make_checks(self) -> None:
        """The thread: each stage once it is open."""
        if is_gpu := self._process.device.type == "cuda":
            torch.cuda.set_device(self._process.device)
        store = _store()
        for number, stage in enumerate(self._stages):
            _wait_for(store, [f"open/{number}"], None)
            try:
                result = self._check(stage)
            except Exception as error:
                reason = " ".join(str(error).split())[:_LONGEST_REASON]
                result = Result(problem=f"failed: {reason or type(error).__name__}")
            if is_gpu:
                torch.cuda.empty_cache()  # For the test of free memory, and for NCCL's buffers.
            store.set(f"found/{number}/{self._process.rank}", json.dumps(asdict(result)))

    def _check(self, stage: Stage) -> Result:
        device, operations = self._process.device, self._operations
        gib = self._settings.memory_gib
        if stage.check == plan.MATMUL:
            return probes.matmul(device, operations)
        if stage.check == plan.MEMORY:
            num_bytes = probes.bytes_to_test(device) if gib is None else int(gib * 2**30)
            return probes.memory(device, operations, num_bytes)
        if stage.check == plan.DISK:
            return probes.disk(self._settings.folder, self._process.rank, operations)
        group = stage.group_of(self._process.rank)
        if group is None:
            return Result()
        return probes.all_reduce(group, device, operations, self._settings.timeout_s)

    def lead(self, say: Callable[[str], None]) -> None:
        """Open stage after stage until one does not end, and set the verdict."""
        store, size = self.store, self._process.world_size
        names = [f"rank/{rank}" for rank in range(size)]
        _wait_for(store, names, None)
        ranks = [Rank(**json.loads(store.get(name))) for name in names]
        found: list[dict[int, dict[str, Any]]] = []
        for number, stage in enumerate(self._stages):
            say(f"{number + 1} of {len(self._stages)}: {stage.words}")
            store.set(f"open/{number}", "")
            keys = {rank: f"found/{number}/{rank}" for rank in range(size)}
            ended = _wait_for(store, list(keys.values()), self._settings.timeout_s)
            present = {rank: key for rank, key in keys.items() if ended or store.check([key])}
            found.append({rank: json.loads(store.get(key)) for rank, key in present.items()})
            if not ended:
                break
        judge = Judge(ranks, self._settings.timeout_s, self._settings.slow)
        checks = outcomes(self._stages, found)
        rates = {
            check: {
                name: {" ".join(map(str, units)): rate for units, rate in of_groups.items()}
                for name, of_groups in outcome.rates.items()
            }
            for check, outcome in checks.items()
        }
        problems = judge.lines(self._stages, found)
        data = {"problems": problems, "ranks": [asdict(rank) for rank in ranks], "rates": rates}
        store.set("verdict", json.dumps(asdict(Health(problems, table(ranks, checks), data))))


def _place(process: Process) -> Rank:
    device = process.device
    facts = describe_device(device)
    kind = facts["device"] if device.type == "cuda" else "CPU"
    node = process.rank // process.local_world_size
    return Rank(node, socket.gethostname(), device.index, kind)


def _store() -> dist.Store:
    """A thread's own connection: a wait on one keeps the others of that connection waiting."""
    return dist.PrefixStore("health", default_store())


def _wait_for(store: dist.Store, keys: list[str], seconds: float | None) -> bool:
    """Whether all keys were there before `seconds` had passed; None waits for ever: torchrun ends
    a rank whose peers die."""
    end = None if seconds is None else time.monotonic() + seconds
    while not (met := store.check(keys)) and (end is None or time.monotonic() < end):
        time.sleep(_POLL_S)
    return met
