"""All ranks' steps of a configuration in a fake world, under several routings, and whether their
collectives match."""

import gc
import logging
import os
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist

from titan_moe.checks.job import check
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig, Parallelism
from titan_moe.config.parse import resolve
from titan_moe.config.pipeline import num_stages
from titan_moe.distributed.context_parallel.apply import local_positions
from titan_moe.distributed.parallel_dims import parallel_dims
from titan_moe.models.config import ModelConfig
from titan_moe.moe.router import GivenExperts
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.position import POSITION
from titan_moe.runtime.process_pool import in_fresh_processes
from titan_moe.simulate.comm_counter import axes_of_groups
from titan_moe.simulate.desync import Finding, Group, RankLog, find_desyncs
from titan_moe.simulate.fake_rank import FakeRank, empty_batch, fake_world
from titan_moe.simulate.issued import RecordingRank
from titan_moe.simulate.lockstep import AbandonedError, Peers, run_ranks
from titan_moe.simulate.routings import ROUTINGS, Routing, without_targets
from titan_moe.simulate.step import rank_step
from titan_moe.simulate.whereabouts import Whereabouts

START = "start"
_FEWEST_TOKENS = 256
_MOST_SHOWN = 5


class Task(NamedTuple):
    """Holds what to simulate: a job, its model and the number of ranks."""

    job: JobConfig
    config: ModelConfig
    world_size: int
    num_microbatches: int
    """Microbatches of the first step; each further step has one."""
    reduced: str
    """Text that says what is smaller than configured."""


@dataclass
class WorldReport:
    """Holds the results of a simulation."""

    findings: list[tuple[str, Finding]] = field(default_factory=list)
    """Findings, each with its trial: "start" or the name of a routing."""
    errors: list[str] = field(default_factory=list)
    """Tracebacks of ranks that failed where no collective explains it."""
    trials: list[str] = field(default_factory=list)
    """Trials that all ranks have completed."""
    collectives: int = 0
    """Number of collectives compared, over all ranks and trials."""
    seconds: float = 0.0

    def as_json(self, task: Task) -> dict[str, Any]:
        return {
            "ranks": task.world_size,
            "reduced": task.reduced,
            "parts": self.trials,
            "collectives": self.collectives,
            "problems": [
                {"routing": trial, "group": finding.group, "text": finding.text}
                for trial, finding in self.findings
            ],
            "seconds": round(self.seconds, 1),
        }

    def in_words(self, task: Task) -> list[str]:
        lines = [f"all {task.world_size} ranks, with {task.reduced}"]
        for trial, finding in self.findings[:_MOST_SHOWN]:
            lines.append(f"{trial}: {finding.group}: {finding.text}")
        if (more := len(self.findings) - _MOST_SHOWN) > 0:
            lines.append(f"and {more} more groups")
        verdict = "members of a group differ" if self.findings else "every group's members agree"
        return [
            *lines,
            f"{verdict}: {self.collectives:,} collectives compared, {', '.join(self.trials)}; "
            f"{self.seconds:.0f} s",
        ]


def simulate_collectives(task: Task) -> WorldReport:
    """Run all ranks of the task; none sees a GPU. Raises RunError if a rank fails for a reason that
    no collective explains."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    started = time.perf_counter()
    (((_, report)),) = in_fresh_processes(run_world, [(task,)], num_workers=1)
    report.seconds = time.perf_counter() - started
    if report.errors and not report.findings:
        raise RunError(f"a rank of the fake world failed:\n{report.errors[0]}")
    return report


def smallest_task(
    job: JobConfig, world_size: int, *, layers: int | None = None, seq_len: int | None = None
) -> Task:
    """Returns all ranks of a job with the fewest layers that show every kind of layer and fill a
    pipeline's stages, and with short sequences; `layers` and `seq_len` say otherwise.

    Raises ConfigError for a configuration that cannot run on so many ranks.
    """
    whole, config, *_ = rank_step(job, world_size)
    parallelism, training = whole.parallelism, whole.training
    if layers is None:
        layers = max(_layers_of_all_kinds(whole, config), _fewest_layers(parallelism, config))
    if seq_len is None:
        seq_len = training.seq_len
        unit = 2 * parallelism.context_parallel_degree * parallelism.tensor_parallel_degree
        while seq_len % (2 * unit) == 0 and seq_len // 2 >= _FEWEST_TOKENS:
            seq_len //= 2
    layers = min(layers, config.num_layers)
    reduced = f"{layers} of {config.num_layers} layers, {seq_len:,} of {training.seq_len:,} tokens"
    microbatch = training.local_batch_size * parallel_dims(parallelism, world_size).size("batch")
    microbatches = min(2, training.global_batch_size // microbatch)
    small = whole.with_values(training={"seq_len": seq_len}).model_copy(update={"stages": []})
    config = replace(config, num_layers=layers)
    if problems := check(small, config, world_size):
        raise ConfigError(problems)
    return Task(small, config, world_size, microbatches, reduced)


def _layers_of_all_kinds(job: JobConfig, config: ModelConfig) -> int:
    period = job.activation_checkpoint.every or 1
    kinds = [
        (config.is_moe_layer(layer), config.mixer(layer), layer % period)
        for layer in range(config.num_layers)
    ]
    return max(kinds.index(each) for each in set(kinds)) + 1


def _fewest_layers(parallelism: Parallelism, config: ModelConfig) -> int:
    """Returns the fewest layers that fill a pipeline's stages; all if stages have given sizes."""
    modules = parallelism.module_fqns_per_model_part
    if parallelism.pipeline_parallel_layers_per_stage is not None or modules is not None:
        return config.num_layers
    return num_stages(parallelism, config.num_layers)


# --- in the process that starts the ranks ---


def run_world(task: Task) -> WorldReport:
    """Run all ranks of the task, in processes forked from this one, and compare."""
    torch.set_num_threads(1)
    # In a build for CUDA a backward starts threads, and autograd refuses to work after a fork then.
    if not torch.backends.cuda.is_built():
        _warm_up(task)
    gc.collect()
    gc.freeze()  # The ranks share what is here as long as they do not write to it.
    return _compare_all(task)


def _compare_all(task: Task) -> WorldReport:
    report = WorldReport()
    trials = [START, *(routing.name for routing in _routings(task.config))]
    waiting: dict[str, dict[int, RankLog]] = {trial: {} for trial in trials}
    with closing(run_ranks(partial(_run_rank, task), task.world_size)) as ranks:
        for rank, value, error, has_ended in ranks:
            if error:
                report.errors.append(f"rank {rank}:\n{error}")
            if not has_ended:
                trial, log = value
                waiting[trial][rank] = log
            trial = next(iter(waiting))
            if len(waiting[trial]) < task.world_size:
                continue
            _compare(report, trial, waiting.pop(trial))
            if report.findings or report.errors or not waiting:
                break
        else:
            dead = RankLog((), (), is_whole=False)
            for trial, logs in waiting.items():
                _compare(report, trial, dict.fromkeys(range(task.world_size), dead) | logs)
    missing = [trial for trial in trials if trial not in report.trials]
    if not (report.findings or report.errors) and (missing or not report.collectives):
        report.errors.append(f"nothing was compared of {', '.join(missing) or 'any trial'}")
    return report


def _compare(report: WorldReport, trial: str, logs: Mapping[int, RankLog]) -> None:
    logs = dict(sorted(logs.items()))
    is_whole = all(log.is_whole for log in logs.values())
    if not report.findings:
        found = find_desyncs(logs, has_failed=bool(report.errors) and not is_whole)
        report.findings += [(trial, finding) for finding in found]
    report.collectives += sum(len(log.issued) for log in logs.values())
    if is_whole:
        report.trials.append(trial)


def _routings(config: ModelConfig) -> list[Routing]:
    """Without experts all are the same but for what is masked."""
    first = ROUTINGS[0]
    return [r for r in ROUTINGS if config.moe is not None or r == first or r.masks_a_rank]


def _warm_up(task: Task) -> None:
    """Import, and let torch learn, what a step needs, once for all ranks.

    The world is larger than theirs by one, so that no mesh of it is one of theirs: see
    `fake_world`.
    """
    world_size = task.world_size + 1
    one_batch = task.job.with_values(training={"global_batch_size": -1})
    job = resolve(one_batch.model_copy(update={"parallelism": Parallelism()}), world_size)
    with fake_world(0, world_size):
        FakeRank(job, task.config).step()


# --- one rank ---


def _run_rank(task: Task, rank: int, peers: Peers) -> None:
    gc.disable()  # A tenth of the time otherwise.
    logging.disable(logging.WARNING)  # Every rank would say it.
    whereabouts = Whereabouts()
    recorder = RecordingRank(peers, whereabouts)
    trial, fake, is_whole = START, None, False
    with fake_world(rank, task.world_size):
        try:
            fake = FakeRank(task.job, task.config, recorder)
            POSITION.enter_phase("step")
            for number, routing in enumerate(_routings(task.config)):
                peers.report((trial, _log(recorder, fake)))
                gc.collect()
                trial = routing.name
                with whereabouts.watching(fake.sharded.parts):
                    _step(task, fake, routing, 1 if number else task.num_microbatches)
            is_whole = True
        except AbandonedError:
            pass
        finally:
            peers.report((trial, _log(recorder, fake, is_whole=is_whole)))


def _step(task: Task, fake: FakeRank, routing: Routing, num_microbatches: int) -> None:
    """Makes one step under a routing."""
    dims, rank = fake.sharded.meshes.dims, dist.get_rank()
    for layer, moe in fake.sharded.moe_layers().items():
        seed = crc32(f"{rank} {layer}".encode())
        choose = routing.choice(seed, moe.config.num_experts, moe.config.top_k)
        moe.router.select = GivenExperts(routing.name, choose)
    batch = empty_batch(task.job)
    if routing.masks_a_rank and dims.coordinate(rank, "batch") == 0:
        # The positions that the first cp rank reads: the ranks that read them have no target.
        seq_len = task.job.training.seq_len
        balanced = fake.sharded.plan.head_tail
        batch = without_targets(batch, local_positions(seq_len, dims.cp, 0, balanced=balanced))
    fake.step(num_microbatches, batch)


def _log(recorder: RecordingRank, fake: FakeRank | None, *, is_whole: bool = True) -> RankLog:
    known = {} if fake is None else axes_of_groups(fake.sharded.meshes)
    # Private: torch has no list of groups. In the order in which they were made.
    world = dist.distributed_c10d._world
    groups = [
        Group(name, tuple(sorted(world.pg_group_ranks[group])), known.get(name, group.group_desc))
        for group, name in world.pg_names.items()
    ]
    return RankLog(recorder.taken(), groups, is_whole=is_whole)
