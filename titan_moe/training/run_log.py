"""The log of a run: at each logged step one line and one JSON object."""

import json
import logging
import platform
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from titan_moe.comm.process import Process
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import save_job
from titan_moe.config.training_stages import tokens_per_step, training_stages
from titan_moe.data.sequences import Identity
from titan_moe.distributed.parallel_dims import parallel_dims
from titan_moe.distributed.summary import layout_summary, pipeline_summary
from titan_moe.metrics.jsonl import PREDICTED, JsonLines, add_event, keep_earlier, set_events_aside
from titan_moe.metrics.sinks import Console, Sink, build_sinks
from titan_moe.metrics.step_metrics import expert_load
from titan_moe.models.config import ModelConfig
from titan_moe.models.stats import part_flops
from titan_moe.parallelize.memory import GIB, accumulation_line, memory
from titan_moe.parallelize.parallelize import ShardedModel
from titan_moe.planner.load import Load
from titan_moe.planner.step_time import step_time
from titan_moe.runtime.device import describe_device, known_gpu, memory_of
from titan_moe.runtime.files import replacing, write_whole
from titan_moe.runtime.position import POSITION
from titan_moe.runtime.revision import running_code
from titan_moe.training.train_step import StepResult

logger = logging.getLogger(__name__)

WITHOUT_TEXT = "data/documents_without_text"
"""The number of documents that the run has read as empty ones so far."""
_SETTLED = 3
"""The logged step of a layout, from 1, that stands for the later ones. The first one compiles and
connects, and the second one's seconds may be a single step's."""


class Phases:
    """Adds up wall seconds per named phase between two logged steps:
    `with phases("data"): batch = next(loader)`. A phase is this rank's position too.

    The seconds are the host's: work that a GPU has queued counts in the phase that waits for it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str, step: int | None = None) -> Iterator[None]:
        """`step`: the one that begins with this phase."""
        start = self._clock()
        POSITION.enter_phase(name, step)
        try:
            yield
        finally:
            self._seconds[name] += self._clock() - start
        POSITION.enter_phase("")  # After an exception: where that was raised.

    def take(self) -> dict[str, float]:
        """Seconds per phase since the last call, as {"time/<phase>": seconds}; starts anew."""
        metrics = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return metrics


class RunLog:
    """Collects each step's figures and hands the logged ones to the sinks of the main rank.

    Args:
        job: of the whole run.
        sharded: the model of the stage that step `resume_step` + 1 is in.
    """

    def __init__(
        self, job: JobConfig, sharded: ShardedModel, process: Process, *, resume_step: int
    ) -> None:
        self.phases, self._warned = Phases(), False
        self._job, self._process = job, process
        self._last_steps = {job.training.steps, *(stage.from_step - 1 for stage in job.stages)}
        self._folder = Path(job.job.dump_folder)
        self._layers = [name.removesuffix(".block") for name in sharded.all_moe_layers()]
        self._sinks: list[Sink] = []
        self._details: dict[str, JsonLines] = {}
        if process.is_main:
            set_events_aside(self._folder, resume_step=resume_step)
            self._open_sinks(resume_step)
        self.set_layout(sharded, resume_step=resume_step)

    def _open_sinks(self, resume_step: int) -> None:
        config, record = self._job.metrics, self._job.model_dump(mode="json")
        self._details = {
            name: JsonLines(self._folder / f"{name}.jsonl", resume_step=resume_step)
            for name in ("expert_counts", "parameter_norms")
            if getattr(config, f"log_{name}")
        }
        self._sinks = build_sinks(config, self._folder, record, resume_step=resume_step)
        if logger.isEnabledFor(logging.INFO):  # LOG_RANK names this rank.
            self._sinks.append(Console(sys.stdout, steps=self._job.training.steps))

    def event(self, step: int, values: dict[str, Any]) -> None:
        """Append a decision about a step to events.jsonl."""
        if self._process.is_main:
            add_event(self._folder, step, values)

    def set_layout(self, sharded: ShardedModel, *, resume_step: int) -> None:
        """Measure from now on, and by the layout that the run has after step `resume_step`."""
        plan = sharded.plan
        adapts, seq_len = plan.job.lora.rank is not None, plan.job.training.seq_len
        self._flops_per_token = model_flops_per_token(plan.config, seq_len, adapts=adapts)
        # Known for bf16 only: without MFU and a bound in other types.
        gpu = known_gpu(sharded.device) if plan.types.compute == "bfloat16" else None
        self._gpu = None if gpu is None else replace(gpu, node=self._process.local_world_size)
        self._plan, self._num_logged = plan, 0
        self._estimate, self._is_over = memory(plan), False
        self._first_step = resume_step + 1
        self._tokens_since, self._last_logged = 0, resume_step
        self._last_log = time.perf_counter()

    def wants(self, step: int) -> bool:
        """Tells whether a step is logged: the first and last of each stage, each log_freq-th."""
        at_an_end = step == self._first_step or step in self._last_steps
        return at_an_end or step % self._job.metrics.log_freq == 0

    def step(
        self,
        step: int,
        result: StepResult,
        *,
        rates: dict[str, float],
        tokens: int,
        step_tokens: int,
        validation_loss: float | None,
        without_text: str = "",
    ) -> None:
        """Take a finished step; log it if it is one to log or has a validation loss.

        Args:
            rates: learning rate of each parameter group.
            tokens: tokens of the whole run so far; step_tokens: those of this step.
            without_text: a document without a text.
        """
        self._tokens_since += step_tokens
        if not self.wants(step) and validation_loss is None:
            return
        assert result.metrics is not None, "not a logged step"
        phases = self.phases.take()
        seconds = time.perf_counter() - self._last_log - phases.get("time/validation", 0.0)
        values = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": max(rates.values()),
            "tokens": tokens,
            "steps": step - self._last_logged,
            **result.metrics,
            **throughput(
                self._tokens_since,
                seconds,
                devices=self._process.world_size,
                flops_per_token=self._flops_per_token,
                peak=None if self._gpu is None else self._gpu.flops,
            ),
            **({} if validation_loss is None else {"validation_loss": validation_loss}),
            **{f"lr/{group}": rate for group, rate in rates.items()},
            **phases,
            "time/elapsed": seconds,
            **memory_metrics(self._process.device),
        }
        self._warn_without_text(step, values, without_text)
        if result.rows_dropped and result.counts_LE is not None:
            values["dispatch/dropped"] = result.rows_dropped / result.counts_LE.sum().item()
        if result.counts_LE is not None and self._sinks:
            values |= expert_load(result.counts_LE, self._layers)
        if self._process.is_main:
            self._compare_memory(step, values)
            trained = (seconds - phases.get("time/checkpoint", 0.0)) / values["steps"]
            values |= self._compare_time(step, trained, result.counts_LE)
        for sink in self._sinks:
            sink.write(step, values)
        if (counts := self._details.get("expert_counts")) and result.counts_LE is not None:
            counts.write(step, dict(zip(self._layers, result.counts_LE.tolist(), strict=True)))
        if (norms := self._details.get("parameter_norms")) and result.parameter_norms is not None:
            norms.write(step, result.parameter_norms)
        self._tokens_since, self._last_logged, self._last_log = 0, step, time.perf_counter()

    def _warn_without_text(self, step: int, values: Mapping[str, float], example: str) -> None:
        """Warn once of documents without a text."""
        if (count := values.get(WITHOUT_TEXT)) and self._process.is_main and not self._warned:
            self._warned = True
            named = f", such as {example}" if example else ""
            line = "%d documents have no text by step %d and are read as empty ones%s; %s counts on"
            logger.warning(line, count, step, named, WITHOUT_TEXT)

    def _compare_memory(self, step: int, values: Mapping[str, float]) -> None:
        """Log a layout's first step beside the estimate of its memory; warn once of a step that
        takes more. A CPU's process has Python and torch too, and is not compared."""
        peak, tensors = values["memory/peak_gib"], self._estimate.total + self._estimate.skew
        line, is_over = f"the process {peak:.2f} GiB, tensors {tensors / GIB:.2f} estimated", False
        if (used := values.get("memory/used_gib")) is not None:
            needed, reserved = self._estimate.needed / GIB, values["memory/reserved_gib"]
            line = f"tensors {peak:.1f} of {tensors / GIB:.1f} GiB estimated, "
            line += f"reserved {reserved:.1f}, the GPU {used:.1f} of {needed:.1f}"
            is_over = peak > tensors / GIB or used > needed
        if is_over and not self._is_over:
            logger.warning("step %d takes more memory than estimated: %s", step, line)
        elif step == self._first_step:
            logger.info("memory at step %d: %s", step, line)
        self._is_over |= is_over

    def _compare_time(
        self, step: int, seconds: float, counts_LE: torch.Tensor | None
    ) -> dict[str, float]:
        """Log a layout's first logged step, and its settled one, beside what the planner expects on
        this GPU, if it knows it. Returns what it expects by region, as metrics.

        Args:
            seconds: of one step, a mean since the last logged one.
            counts_LE: tokens per layer and expert: the load that is expected.
        """
        self._num_logged += 1
        state = {1: "the first one", _SETTLED: "settled"}.get(self._num_logged)
        if self._gpu is None or state is None:
            return {}
        counts_LE = torch.zeros(0, 1) if counts_LE is None else counts_LE
        shares_LE = counts_LE / counts_LE.sum(1, keepdim=True).clamp(min=1)
        load = Load("measured", tuple(map(tuple, shares_LE.tolist())))
        parts = step_time(self._plan, self._gpu, load)
        total, most = sum(parts.values()), max(parts, key=lambda region: parts[region])
        line = "step %d, %s: %.0f %% of this layout's bound: %.2f s a step, %.2f s predicted"
        line += f"; most of it {most} {parts[most]:.2f} s"
        logger.info(line, step, state, 100 * total / seconds, seconds, total)
        return {PREDICTED + region: value for region, value in parts.items()}

    def close(self) -> None:
        """End the sinks."""
        for sink in (*self._sinks, *self._details.values()):
            sink.close()


def describe_layout(sharded: ShardedModel) -> None:
    """Log how the world and the parameters are cut, and the memory that this needs by arithmetic;
    the main rank's job."""
    plan, parameters = sharded.plan, dict(sharded.named_parameters())
    estimate = memory(plan)
    logger.info("%s", layout_summary(parameters, sharded.meshes, accumulation_line(plan, estimate)))
    if plan.dims.pp > 1:
        flops = part_flops(plan.config, plan.job.training.seq_len)
        stages, size = (plan.stages, plan.stages_of_ranks), plan.job.training.local_batch_size
        logger.info("%s", pipeline_summary(plan.job.parallelism, *stages, flops, size))
    logger.info("memory of a rank by arithmetic, %s: %s", estimate.unit, estimate)
    if (gpu := memory_of(sharded.device)) is not None:
        logger.info("%s", estimate.margin(gpu))


def describe_run(job: JobConfig, process: Process, data: Identity) -> None:
    """Write config.toml and run.json into the run's folder; the main rank's job. An earlier
    start's other configuration is kept beside it."""
    folder = Path(job.job.dump_folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.toml"
    with replacing(path) as aside:
        save_job(job, aside)
        if path.exists() and path.read_bytes() != aside.read_bytes():
            keep_earlier(path)
    write_whole(folder / "run.json", json.dumps(run_facts(job, process, data), indent=1))


def run_facts(job: JobConfig, process: Process, data: Identity) -> dict[str, Any]:
    """Returns what a run's figures depend on besides its configuration. Layout and data are
    those of the first stage, "stages" has what differs in the others.

    Args:
        job: of the whole run.
        data: of any of its stages.
    """
    training = job.training
    first_data = replace(
        data, global_batch_size=training.global_batch_size, seq_len=training.seq_len
    )
    first, *later = [
        {
            "from_step": step,
            "layout": parallel_dims(stage.parallelism, process.world_size).sizes,
            "tokens_per_step": tokens_per_step(job)[step],
        }
        for step, stage in training_stages(job)
    ]
    return {
        "code": running_code(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **describe_device(process.device),
        "threads": torch.get_num_threads(),
        "world_size": process.world_size,
        "layout": first["layout"],
        "tokens_per_step": first["tokens_per_step"],
        "data": asdict(first_data),
        **({"stages": later} if later else {}),
    }


def model_flops_per_token(config: ModelConfig, seq_len: int, *, adapts: bool = False) -> float:
    """FLOPs of forward and backward for one token: of its top_k experts, not of all.

    A matrix product costs twice its forward again in the backward (arXiv 2204.02311, appendix B);
    recomputation does not count. Where the model `adapts`, frozen weights have no gradients: a
    product costs its forward once more; adapters and the rest of attention's backward are left out.
    """
    return (2 if adapts else 3) * sum(part_flops(config, seq_len).values())


def throughput(
    num_tokens: int, seconds: float, *, devices: int, flops_per_token: float, peak: float | None
) -> dict[str, float]:
    """Returns the rates over num_tokens of the whole job in `seconds` of wall time. "mfu" is a
    fraction of `peak`, a device's FLOP/s in the type that it computes in; None: unknown."""
    flops = num_tokens / seconds / devices * flops_per_token
    return {
        "tokens_per_second": num_tokens / seconds,
        "tokens_per_second_per_device": num_tokens / seconds / devices,
        "tflops_per_device": flops / 1e12,
        **({} if peak is None else {"mfu": flops / peak}),
    }


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Returns what this rank holds, in GiB; CUDA peaks are those since the last call.

    On CUDA "memory/peak_gib" (tensors), "memory/reserved_gib" (with the allocator's reserve),
    "memory/used_gib" (now, of all the GPU: with NCCL's buffers, CUDA and other processes),
    "memory/gpu_gib" (what the GPU has), "memory/ooms" (failed allocations since the start) and
    "memory/allocation_retries": how often, since the start, the allocator had to free its cache for
    a new tensor. Anything but 0 there costs time: the run needs nearly all of the GPU's memory.
    On the CPU "memory/resident_gib" and "memory/peak_gib", the most since the process started,
    Python and torch included.
    """
    if device.type == "cuda":
        stats, (free, total) = torch.cuda.memory_stats(device), torch.cuda.mem_get_info(device)
        torch.cuda.reset_peak_memory_stats(device)
        return {
            "memory/peak_gib": stats["allocated_bytes.all.peak"] / GIB,
            "memory/reserved_gib": stats["reserved_bytes.all.peak"] / GIB,
            "memory/used_gib": (total - free) / GIB,
            "memory/gpu_gib": total / GIB,
            "memory/allocation_retries": stats["num_alloc_retries"],
            "memory/ooms": stats["num_ooms"],
        }
    # Kilobytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    metrics = {"memory/peak_gib": peak / GIB}
    statm = Path("/proc/self/statm")
    if statm.exists():
        resident_pages = int(statm.read_text().split()[1])
        metrics["memory/resident_gib"] = resident_pages * resource.getpagesize() / GIB
    return metrics
