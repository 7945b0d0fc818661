"""Builds one rank of a job on a fake GPU, and trains two steps."""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from scripts.rehearsal.cases import Case
from scripts.rehearsal.fake_cuda import CUDA, FakeCuda, fake_cuda
from scripts.rehearsal.ledger import Counts, Finding
from scripts.rehearsal.places import Place, here, place_of
from scripts.rehearsal.standins import stand_ins
from titan_moe.config.job_config import JobConfig
from titan_moe.data.batch import Batch
from titan_moe.distributed.execution import LocalBatch
from titan_moe.simulate.comm_counter import axes_of_groups
from titan_moe.simulate.fake_rank import empty_batch, fake_world
from titan_moe.training.train_step import Observer, build_step

_GPUS_OF_A_NODE = 8
_MICROBATCHES = 2


@dataclass
class Rehearsal:
    """The findings about one rank, and its counts."""

    findings: list[Finding] = field(default_factory=list)
    microbatches: list[Counts] = field(default_factory=list)
    """Counts of the second step's microbatches: a schedule's first use costs more."""


def rehearse(case: Case, microbatches: int = _MICROBATCHES) -> Rehearsal:
    """Trains two steps. Raises ConfigError if the case's job is refused."""
    found, job = Rehearsal(), case.resolved()
    with fake_world(case.rank, case.world_size), fake_cuda() as mode, stand_ins(mode):
        try:
            _train(job, case, mode, found, microbatches)
        except Exception as error:  # Whatever torch's rules or the program refuse is a finding.
            found.findings += [*dict.fromkeys(mode.ledger.findings), _refused(error)]
    return found


def _train(job: JobConfig, case: Case, mode: FakeCuda, found: Rehearsal, microbatches: int) -> None:
    ledger = mode.ledger
    torch.cuda.set_device(CUDA)
    sharded, _, step = build_step(
        job, case.config, device=CUDA, draw_weights=False, ranks_per_node=_GPUS_OF_A_NODE
    )
    mode.groups = axes_of_groups(sharded.meshes)  # No collective is counted without them.
    waits = _waits(job) * _pieces(job) * microbatches * len(sharded.moe_layers())
    for logged in (True, False):
        mode.clear()
        ledger.begin_step()
        marks = Marks(mode)
        step([empty_batch(job)] * microbatches, logged=logged, observer=marks)
        ledger.end_step()
        found.findings += [
            finding
            for finding in ledger.judged(waits_in_layers=waits)
            if finding not in found.findings
        ]
    marks.end()
    found.microbatches = marks.counts()[:-1]  # The last counts are the update's.


def _pieces(job: JobConfig) -> int:
    """Returns the number of forwards of a layer for one microbatch of the step."""
    parallelism = job.parallelism
    if parallelism.pipeline_parallel_degree == 1:
        return 1
    return job.training.local_batch_size // parallelism.pipeline_parallel_microbatch_size


def _waits(job: JobConfig) -> int:
    """Waits of a layer's forward."""
    keys = job.parallelism
    if keys.expert_parallel_capacity_factor or keys.expert_parallel_comm_backend == "symmetric":
        return 0
    return 1 + keys.expert_parallel_overlap


def _refused(error: Exception) -> Finding:
    """Returns the finding about an error, or about the first of a chain of errors."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    places = [
        Place(where, frame.lineno or 0)
        for frame in frames
        if (where := place_of(frame.filename, frame.name)) is not None
    ]
    said = (str(error).strip().splitlines() or [""])[0]
    return Finding("refused", places[-1] if places else here(), f"{type(error).__name__}: {said}")


class Marks(Observer):
    """Keeps counts: before each microbatch, after the last, and at the end."""

    def __init__(self, mode: FakeCuda) -> None:
        self._mode = mode
        self._seen: list[Counts] = []

    def reads(self, batch: Batch, local: LocalBatch) -> None:
        self.end()

    def accumulated(self) -> None:
        self.end()

    def end(self) -> None:
        """Keeps the counts until now."""
        self._seen.append(self._mode.counts())

    def counts(self) -> list[Counts]:
        """Returns the counts between each mark and the next."""
        return [after - before for before, after in pairwise(self._seen)]


def rehearse_all(cases: Sequence[Case]) -> list[tuple[str, list[Finding]]]:
    """Rehearses cases of one rank. Needs a process that has not been another rank."""
    torch.set_num_threads(1)
    return [(case.name, rehearse(case).findings) for case in cases]
