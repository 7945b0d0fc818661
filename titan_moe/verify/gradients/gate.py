"""Proves layouts: each one's ranks train the same model as the reference, tensor by tensor."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from titan_moe.checks.job import check
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.models.config import ModelConfig
from titan_moe.models.hf import model_of_job
from titan_moe.runtime.ranks import RankError, run_on_ranks
from titan_moe.verify.gradients.compare import TensorDifference, above_bound, by_cause, first_few
from titan_moe.verify.gradients.fixture import (
    Fixture,
    easy,
    make_fixture,
    own_batches,
    own_tables,
    unmet,
)
from titan_moe.verify.gradients.reference import IGNORED
from titan_moe.verify.gradients.worker import RankReport, Task, verify_on_rank
from titan_moe.verify.layouts.layouts import (
    AXES,
    Layout,
    Tables,
    apply_layout,
    depth,
    num_sequences,
)

_MOST_LINES = 12


@dataclass
class Result:
    """The gate's result for one layout."""

    layout: str
    dtype: str
    status: str
    """"passed", "failed", or "refused": the model has no such layout, or proves nothing."""
    seconds: float = 0.0
    num_compared: int = 0
    worst: float = 0.0
    worst_tensor: str = ""
    lines: list[str] = field(default_factory=list)
    """Reasons for not passing: each names step, rank, tensor and ratio of norms."""
    traceback: str = ""
    """The traceback of the first rank that died, if one did."""

    @property
    def passed(self) -> bool:
        return self.status == "passed"


class Gate:
    """One family's gate.

    Args:
        job: the configuration; its degrees, options and batch sizes are replaced by each layout's,
            and some keys by the proof's. With comm.share_gpus, ranks share GPUs.
        folder: where references are kept for the ranks to read.
        device: "cpu", or "cuda" for ranks on GPUs; the reference is computed on the CPU.
    """

    def __init__(self, job: JobConfig, folder: Path, *, device: str = "cpu") -> None:
        self.job, self.folder, self.device = job, folder, device
        self.own_tables: Tables = own_tables(job)
        self._fixtures: dict[tuple[int, int], tuple[Path, Fixture]] = {}

    @cached_property
    def config(self) -> ModelConfig:
        """Raises ConfigError for a model that the gate cannot test."""
        name, flavor = self.job.model.name, self.job.model.flavor
        config = model_of_job(self.job.model)
        if config.moe is None:
            raise ConfigError(f"model.flavor={flavor} of {name} has no experts: choose another")
        if (optimizer := self.job.optimizer.name) not in ("AdamW", "Muon"):
            raise ConfigError(f"optimizer.name={optimizer}: the gate knows AdamW and Muon")
        return config

    def refusal(self, layout: Layout) -> str:
        """Returns why the configuration's checks refuse a layout; nothing if they do not."""
        job, config = self._setting(layout, "float64")
        return "; ".join(check(job, config, layout.world_size))

    def verify(self, layout: Layout, *, dtype: str = "float64") -> Result:
        """Train in this layout and compare."""
        started = time.perf_counter()
        result = Result(str(layout), dtype, "refused")
        if refusal := self.refusal(layout):
            result.lines = [f"{layout}: {refusal}"]
            return result
        job, config = self._setting(layout, dtype)
        path, fixture = self._fixture(layout)
        problems: list[str] = []
        unfit = easy(fixture, job) + _easy_layout(fixture, job, layout)
        if not unfit:
            task = Task(job, config, layout, path, self.device)
            try:
                shares = self.job.comm.share_gpus
                reports = run_on_ranks(
                    verify_on_rank, layout.world_size, task, device=self.device, share_gpus=shares
                )
                problems = _problems(result, layout, reports)
                unfit = _unpoisoned(reports, layout, config)
            except RankError as error:
                problems, result.traceback = [headline(str(error))], str(error)
        if not problems and unfit:
            result.lines = [f"{layout}: this model proves nothing: {line}" for line in unfit]
        else:
            result.lines = [f"{layout}: {line}" for line in problems]
            result.status = "failed" if problems else "passed"
        result.seconds = round(time.perf_counter() - started, 2)
        return result

    def _setting(self, layout: Layout, dtype: str) -> tuple[JobConfig, ModelConfig]:
        types = {"dtype": dtype, "mixed_precision_param": "float32"}
        job = apply_layout(self.job, layout, self.own_tables).with_values(training=types)
        return job, replace(self.config, num_layers=depth(layout))

    def _fixture(self, layout: Layout) -> tuple[Path, Fixture]:
        key = depth(layout), num_sequences(layout)
        if key not in self._fixtures:
            job, config = self._setting(layout, "float64")
            path = self.folder / "reference-{}-layers-{}-sequences.pt".format(*key)
            fixture = make_fixture(job, config, num_sequences(layout))
            torch.save(fixture, path)
            self._fixtures[key] = path, fixture
        return self._fixtures[key]


def _problems(result: Result, layout: Layout, reports: list[RankReport]) -> list[str]:
    """Fill in the result from the ranks' reports; returns a line for each problem."""
    axes = {axis: layout.size(axis) for axis in AXES}
    axes |= {"edp": layout.edp, "fsdp": layout.dp_shard * layout.cp, "batch": layout.data_ranks}
    found = [difference for report in reports for difference in report.differences]
    if found:
        worst = max(found, key=lambda d: d.error)
        result.worst, result.worst_tensor = worst.error, f"{worst.quantity} {worst.name}".rstrip()
    result.num_compared = len(found)
    lines = [line for report in reports for line in report.problems]
    lines += _lines(above_bound(found, result.dtype), axes)
    return lines


def headline(error: str) -> str:
    """Returns the line of a rank's traceback that names the exception, whose message may go on, or
    begin on the next line."""
    _, _, raised = error.rpartition("Traceback (most recent call last):\n")
    lines = [line.rstrip() for line in raised.splitlines() if line.strip()]
    at = next(index for index, line in enumerate(lines) if not line.startswith(" "))
    return " ".join(lines[at : at + 1 + lines[at].endswith(":")])


def _unpoisoned(reports: list[RankReport], layout: Layout, config: ModelConfig) -> list[str]:
    """Kinds of rows without a token of which there were none."""
    assert config.moe is not None
    # A single expert's rows have a length that is known, and so no tail.
    has_tail = layout.ep < config.moe.num_experts
    return unmet(
        {
            "no row past the last expert's was there to be poisoned": not has_tail
            or any(report.tails for report in reports),
            "no padding inside experts' rows was there to be poisoned": any(
                report.paddings for report in reports
            ),
        }
    )


def _lines(wrong: list[TensorDifference], axes: Mapping[str, int]) -> list[str]:
    """Returns a line for each tensor, router and number of a step: where it is wrong first.

    A gradient's mistake is not repeated for the moments and the parameter that follow from it.
    """
    seen: dict[str, TensorDifference] = {}
    for difference in sorted(wrong, key=by_cause):
        seen.setdefault(difference.name or difference.quantity, difference)
    return first_few([difference.line(axes) for difference in seen.values()], _MOST_LINES)


def _easy_layout(fixture: Fixture, job: JobConfig, layout: Layout) -> list[str]:
    """Reasons why this layout's own share of the batch would let a mistake pass."""
    local = job.training.local_batch_size
    targets = {
        int((own.labels_BS != IGNORED).sum())
        for batch in fixture.batches
        for place in range(layout.data_ranks)
        for own in own_batches(batch, local, place, layout.data_ranks)
    }
    return unmet({"every microbatch has the same number of targets": len(targets) > 1})
