"""The training loop of one rank, in the order in which it runs."""

import gc
import json
import logging
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from titan_moe.checkpoint.checkpointer import Checkpointer
from titan_moe.checkpoint.checksums import checksums
from titan_moe.checkpoint.folder import step_to_go_on_from
from titan_moe.checkpoint.tensors import model_tensors, optimizer_tensors
from titan_moe.checks.job import check_reshard
from titan_moe.comm.process import Process, collect_everything, seed_everything, set_timeouts
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import as_toml, resolve
from titan_moe.config.training_stages import changes, job_of_step, training_stages
from titan_moe.data.batch import Batch
from titan_moe.data.loader import documents_without_text, first_without_text, merge_states
from titan_moe.data.tokenizer import loss_unit
from titan_moe.debug.routing_trace import RoutingTrace
from titan_moe.distributed.compile import compiled_so_far, forget_compiled
from titan_moe.distributed.process_groups import ProcessGroups
from titan_moe.distributed.transfer import move
from titan_moe.metrics.closing import closing_lines, outcome
from titan_moe.metrics.jsonl import INITIAL_WEIGHTS
from titan_moe.models.config import ModelConfig
from titan_moe.models.hf import HFModel
from titan_moe.optim.optimizers import build_optimizer, peak_rates
from titan_moe.optim.schedules import lr_factor, set_lr, warn_of_changed_rate
from titan_moe.parallelize.parallelize import ShardedModel, build_sharded_model, plan_here
from titan_moe.parallelize.plan import Plan
from titan_moe.profiling.profiler import profiler
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.files import write_whole
from titan_moe.runtime.log import log_on_rank_zero
from titan_moe.runtime.position import mark_layers
from titan_moe.runtime.regions import region
from titan_moe.runtime.stopping import StopRequest
from titan_moe.training.bad_step_causes import bad_step_causes
from titan_moe.training.bad_steps import BadSteps
from titan_moe.training.capture.step import StepCapture
from titan_moe.training.run_log import WITHOUT_TEXT, RunLog, describe_layout, describe_run
from titan_moe.training.train_data import TrainData
from titan_moe.training.train_step import StepResult, TrainStep, overflow_line, validation_loss

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """Steps and tokens that a run has trained on."""

    step: int = 0
    tokens: int = 0


class Trainer:
    """Everything of one run on one rank."""

    def __init__(self, job: JobConfig, model_config: ModelConfig, process: Process) -> None:
        """Build model, optimizer, data and log, and load the checkpoint to go on from. Collective.
        Raises ConfigError or RunError."""
        seed_everything(job.debug)
        self.run_job, self.process, self._config = job, process, model_config
        self.folder = Path(job.job.dump_folder)
        stage = job
        if job.stages:
            stage = job_of_step(job, step_to_go_on_from(job.checkpoint, self.folder) + 1)
        self.stop_request = StopRequest(process, os.environ)
        self.bad_steps = BadSteps(job.training)
        plan = self._plan(stage)
        self.sharded, self._ran = _build(plan, process), False
        self._build_step()
        self.data = TrainData(job, plan, process)
        step = self._load()
        if job.training.epochs is not None:  # A run of epochs has no stages.
            self.run_job = self.data.end_with_epochs(stage, step)
            self.sharded = replace(self.sharded, plan=replace(plan, job=self.run_job))
            self.checkpointer.job_record = self.run_job.model_dump(mode="json")
        warn_of_changed_rate(self.checkpointer.loaded_job, self.job.model_dump(), step)
        self.routing = RoutingTrace(self.sharded, process, resume_step=step)
        self.log = RunLog(self.run_job, self.sharded, process, resume_step=step)
        self.losses: tuple[float, float | None] = (math.nan, None)
        """The last step's loss, and the loss of the validation after it."""

    @property
    def job(self) -> JobConfig:
        """The configuration of the present stage; `run_job` is the whole run's."""
        return self.sharded.plan.job

    def _plan(self, job: JobConfig) -> Plan:
        return plan_here(job, self._config, self.process.device, self.process.local_world_size)

    def _build_step(self) -> None:
        """Build optimizer, train step and checkpointer for the model."""
        job, sharded = self.job, self.sharded
        self.optimizer = build_optimizer(
            job.optimizer, sharded.named_parameters(), self._config, sharded.meshes.group
        )
        self.peak_rates = peak_rates(self.optimizer, job.optimizer)
        self.train_step = TrainStep(
            sharded, self.optimizer, stop=self.stop_request.asks, is_spike=self.bad_steps.is_spike
        )
        self.checkpointer = _checkpointer(self.run_job, sharded, self.optimizer)

    def _load(self) -> int:
        """Load the checkpoint to go on from, if there is one; returns its step, or 0."""
        self.progress = Progress()
        state = self.checkpointer.load() or {}
        self.checkpointer.texts = self.data.tokenizer.text_format(self.checkpointer.texts)
        if "data" in state:
            self.data.load_state(state["data"])
        if "step" in state:
            self.progress = Progress(state["step"], state["tokens"])
            self.bad_steps.load_state(state)
            log_on_rank_zero(f"going on after step {self.progress.step}")
        return self.progress.step

    def train(self) -> bool:
        """Train to the last step, or until asked to stop. Returns whether it was stopped, saved."""
        steps, resume_step = self.job.training.steps, self.progress.step
        if resume_step >= steps:
            self.checkpointer.check_export(resume_step, finished=True)
            at = f"{self.checkpointer.folder} is at step {resume_step}"
            line = f"{at}, and {self.data.limit(self.job)} allows no more: raise it to go on"
            log_on_rank_zero(f"{line}, or choose another job.dump_folder")
            self._close()
            return False
        self.checkpointer.check_export(steps)
        if self.process.is_main:
            describe_run(self.run_job, self.process, self.data.loader.identity)
        if self.job.metrics.log_initial_weights and not resume_step:
            found = checksums(model_tensors(self.sharded.parts))
            if self.process.is_main:
                write_whole(self.folder / INITIAL_WEIGHTS, json.dumps(found, indent=1))
        # Python's own collection would run in another step on each rank, and every other rank then
        # waits in the next collective. What start-up has made lives as long as the run.
        gc.disable()
        gc.freeze()
        stages = dict(training_stages(self.run_job)[1:])
        with profiler(self.job.profiling, self.folder, self.process.rank) as profile_step:
            while self.progress.step < steps:
                step = self.progress.step + 1
                if stages.get(step, self.job) != self.job:
                    began = changes(self.job, stages[step])
                    log_on_rank_zero(f"a training stage begins with step {step}: {began}")
                    with self.log.phases("reshard"):
                        self.reshard(stages[step])
                stop = self._step(step)
                if not self._ran:
                    self._end_first_step()
                if step % self.job.training.gc_freq == 0:
                    gc.collect(1)
                profile_step()
                if stop:
                    break
        if stopped := self.progress.step < steps:
            if self.checkpointer.finish() != self.progress.step:
                self.checkpointer.save(self.progress.step, self._state())
            self.stop_request.answer()
        self._close()
        self._say_goodbye()
        return stopped

    def _close(self) -> None:
        self.data.loader.close()
        self.log.close()

    def _end_first_step(self) -> None:
        """Shorten the timeouts: the first step of a layout compiles, and may take long."""
        if self.job.compile.enable:
            graphs, breaks, seconds = compiled_so_far()
            log_on_rank_zero(f"torch.compile: {graphs} graphs, {breaks} breaks, {seconds:.1f} s")
        set_timeouts(self.job.comm.train_timeout_seconds, self.sharded.meshes.groups.all())
        self._ran = True

    def _step(self, step: int) -> bool:
        """Make a step, validate, log and save; returns whether all ranks must stop."""
        phases, training = self.log.phases, self.job.training
        before = self._state()
        with phases("data", step), region("data"):
            batches = self.data.loader.next_step()
        factor = lr_factor(step, self.job.lr_scheduler, training.steps)
        set_lr(self.optimizer, factor)
        asked = step == self.job.debug.capture_step
        capture = StepCapture(self.sharded, self.optimizer, step) if asked else None
        logged = self.log.wants(step) or self._validates(step) or capture is not None
        with phases("step"), self.routing.step(step, batches):
            read = self.data.loader.state_dict()
            result = self.train_step(
                batches,
                logged=logged,
                counts={WITHOUT_TEXT: documents_without_text(read)},
                parameter_norms=self.job.metrics.log_parameter_norms and self.log.wants(step),
                observer=capture,
            )
        if capture is not None:
            capture.write(self.folder)
        # First: with symmetric memory nothing was sent, and what was not received may be anything.
        if result.rows_dropped and self.sharded.plan.stops_on_overflow:
            self.train_step.discard()
            line = overflow_line(self.job.parallelism, result.rows_dropped)
            raise RunError(f"step {step}: {line}; {self._keep(step, before)}")
        if not self._ran and result.loss == 0.0:
            seen = f"step {step}: the loss is exactly 0 over {result.num_targets:,} target tokens"
            logger.warning("%s: nothing is learned; look at the data's documents", seen)
        if result.accepted:
            self.bad_steps.accept(result)
        else:
            self._handle_bad_step(step, result, batches, before)

        step_tokens = training.global_batch_size * training.seq_len
        self.progress = Progress(step, self.progress.tokens + step_tokens)
        validation_loss = None
        if self._validates(step):
            with phases("validation"):
                validation_loss = self._validate()
        self.losses = (result.loss, validation_loss)
        self.log.step(
            step,
            result,
            rates={name: peak * factor for name, peak in self.peak_rates.items()},
            tokens=self.progress.tokens,
            step_tokens=step_tokens,
            validation_loss=validation_loss,
            without_text=first_without_text(read),
        )
        with phases("checkpoint"):
            if (freq := self.job.metrics.replica_check_freq) and step % freq == 0:
                self.checkpointer.check_replicas(step)
            self.checkpointer.maybe_save(step, self._state(), last=step == training.steps)
        return result.stop and self.job.checkpoint.keeps_state

    def _handle_bad_step(
        self, step: int, result: StepResult, batches: list[Batch], before: dict[str, Any]
    ) -> None:
        """Decide about a step that updated nothing. Raises RunError if the run must stop; saves the
        state before the step first."""
        place, worst = bad_step_causes(self.sharded, batches, is_finite=result.finite)
        decision = self.bad_steps.decide(step, result, place)
        self.train_step.discard()
        self.log.event(step, self.bad_steps.record(result, decision, worst))
        if decision.action == "stop":
            kept = self._keep(step, before)
            raise RunError(f"{decision.seen}; {kept} ({decision.remark})")
        logger.warning("%s; %s", decision.seen, decision.remark)

    def _keep(self, step: int, before: dict[str, Any]) -> str:
        """Save the state before a step that updated nothing; returns a line with its folder.
        Collective."""
        if not self.job.checkpoint.keeps_state or step == 1:
            return "no state was kept"
        if self.checkpointer.finish() != step - 1:
            self.checkpointer.save(step - 1, before)
        return f"the state before it is {self.checkpointer.folder}/step-{step - 1}"

    def _validates(self, step: int) -> bool:
        due = step % self.job.validation.freq == 0 or step == self.job.training.steps
        return due and self.data.validation is not None

    def _validate(self) -> float:
        """Returns the held-out loss. Raises RunError if buffers between ranks do not suffice."""
        assert self.data.validation is not None
        loss, dropped = validation_loss(self.data.validation, self.sharded)
        if dropped and self.sharded.plan.stops_on_overflow:
            step = self.progress.step  # Its update is done, and is saved.
            kept = self._keep(step + 1, self._state())
            line = overflow_line(self.job.parallelism, dropped)
            raise RunError(f"validation after step {step}: {line}; {kept}")
        return loss

    def _state(self) -> dict[str, Any]:
        """Returns a checkpoint's state besides tensors; the learning rate follows from the step."""
        return {
            "step": self.progress.step,
            "tokens": self.progress.tokens,
            "data": self.data.loader.state_dict(),
            **self.bad_steps.state(),
        }

    def reshard(self, job: JobConfig) -> None:
        """Change to the layout of `job`, before, between or after the steps of `train`. Collective.
        Sequence length and batch may change too: `data.loader.continue_state` then moves the data
        position.

        Nothing goes through the disk. The later steps have the bits of a run that was saved,
        stopped and resumed in that layout. Parameters move first and are freed, then the
        optimizer's state: memory holds at most one more copy of either.

        Raises ConfigError, and leaves the run as it was, if `job` cannot run in this world or
        differs from the run in more than layout, sequence length and batch.
        """
        world_size, step = self.process.world_size, self.progress.step
        if problems := check_reshard(self.job, job, self._config, world_size):
            raise ConfigError(problems)
        job = resolve(job, world_size)
        set_timeouts(job.comm.init_timeout_seconds, self.sharded.meshes.groups.all())
        forget_compiled(job.compile)
        plan = self._plan(job)
        sent = 0 if plan.fits_model_of(self.sharded.plan) else self._move_to(plan)
        self.sharded, self._ran = replace(self.sharded, plan=plan), False
        self.data.reopen(plan)
        self.routing = RoutingTrace(self.sharded, self.process, resume_step=step)
        self.log.set_layout(self.sharded, resume_step=step)
        collect_everything()
        line = "going on after step %d in this layout; its ranks were sent %d bytes"
        log_on_rank_zero(line, step, sent)

    def _move_to(self, plan: Plan) -> int:
        """Move parameters and optimizer state to another layout; returns the bytes sent."""
        last_step, texts = self.checkpointer.finish(), self.checkpointer.texts
        weights = model_tensors(self.sharded.parts)
        states = optimizer_tensors(self.sharded.parts, self.optimizer)
        self.sharded = _build(plan, self.process, self.sharded.meshes.groups)
        moved = move(weights, model_tensors(self.sharded.parts))
        self._build_step()
        moved_too = move(states, optimizer_tensors(self.sharded.parts, self.optimizer))
        self.checkpointer.last_step, self.checkpointer.texts = last_step, texts
        return moved + moved_too

    def _say_goodbye(self) -> None:
        """Log the losses, the files of the run, and commands to run next."""
        for line in closing_lines(
            self.job.training,
            self.job.checkpoint,
            self.folder,
            step=self.progress.step,
            outcome=outcome(self.progress.step, *self.losses, *loss_unit(self.data.tokenizer)),
            last_saved=self.checkpointer.last_step,
            launch=self.process,
            adapts=self.job.lora.rank is not None,
        ):
            log_on_rank_zero(line)


def train(job: JobConfig, model_config: ModelConfig, process: Process) -> bool:
    """Run a resolved job on this rank: write its seed checkpoint, or train it. Returns whether it
    stopped before its last step, saved."""
    log_on_rank_zero("%s: %s", job.job.description, job.job.dump_folder)
    if job.job.print_config:
        log_on_rank_zero("configuration:\n%s", as_toml(job))
    if not job.checkpoint.create_seed_checkpoint:
        return Trainer(job, model_config, process).train()
    plan = plan_here(job, model_config, process.device, process.local_world_size)
    checkpointer = _checkpointer(job, _build(plan, process), None)
    checkpointer.save(0, {})
    log_on_rank_zero("the initial weights are %s", checkpointer.folder / "step-0")
    return False


def _build(plan: Plan, process: Process, groups: ProcessGroups | None = None) -> ShardedModel:
    """Build the model of a plan; `groups` of an earlier layout mean: no weights yet."""
    sharded = build_sharded_model(plan, process.device, draw_weights=groups is None, groups=groups)
    mark_layers(sharded.parts)
    if process.is_main:
        describe_layout(sharded)
    return sharded


def _checkpointer(
    run_job: JobConfig, sharded: ShardedModel, optimizer: Optimizer | None
) -> Checkpointer:
    job = sharded.plan.job
    return Checkpointer(
        job.checkpoint,
        Path(job.job.dump_folder),
        modules=sharded.parts,
        optimizer=optimizer,
        job_record=run_job.model_dump(mode="json"),
        merge_data=merge_states,
        model=HFModel(job.model.name, sharded.config),
    )
