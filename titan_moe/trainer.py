"""The loop: what a run is, readable as prose."""

import json
import logging
import math
import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.checkpoint.checkpointer import Checkpointer
from titan_moe.config.checks.data import check_vocabulary
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import as_toml, save_job
from titan_moe.data.batch import Batch
from titan_moe.data.build import build_loader, build_validation
from titan_moe.data.loader import merge_states
from titan_moe.data.tokenizer import load_tokenizer, loss_unit
from titan_moe.data.validation import ValidationLoader
from titan_moe.debug.capture.step import StepCapture
from titan_moe.debug.nan_locator import describe_nonfinite
from titan_moe.distributed.compile import compiled_so_far
from titan_moe.distributed.parallelize import ShardedModel, build_sharded_model
from titan_moe.distributed.summary import layout_summary, pipeline_summary
from titan_moe.metrics.closing import next_steps, outcome
from titan_moe.metrics.run_log import RunLog, run_facts
from titan_moe.models.config import ModelConfig
from titan_moe.models.hf import HFModel
from titan_moe.models.stats import part_weights
from titan_moe.moe.layer import take_dropped
from titan_moe.optim.optimizers import build_optimizer
from titan_moe.optim.schedules import lr_factor, set_lr
from titan_moe.profiling.profiler import profiler
from titan_moe.profiling.regions import region
from titan_moe.routing.replay import RoutingTrace
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.lean_start import leave_compiler_out
from titan_moe.runtime.process import GarbageCollector, Process, seed_everything, set_timeouts
from titan_moe.train_step import StepResult, TrainStep, local_batch, num_local_targets

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    tokens: int = 0


class Trainer:
    """Everything of one run on one rank."""

    def __init__(self, job: JobConfig, model_config: ModelConfig, process: Process) -> None:
        """Build, then load the checkpoint to go on from. Collective over all ranks.

        Raises ConfigError or RunError with the lines for the user.
        """
        if not job.compile.enable:
            leave_compiler_out()
        seed_everything(job.debug)
        self.job = job
        self.process = process
        self.folder = Path(job.job.dump_folder)
        sharded = build_sharded_model(
            job,
            model_config,
            device=process.device,
            world_size=process.world_size,
            ranks_per_node=process.local_world_size,
        )
        self.sharded, self.meshes = sharded, sharded.meshes
        if process.is_main:
            logger.info("%s: %s", job.job.description, self.folder)
            if job.job.print_config:
                logger.info("configuration:\n%s", as_toml(job))
            logger.info(layout_summary(dict(sharded.named_parameters()), self.meshes))
            if self.meshes.dims.pp > 1:
                weights = part_weights(sharded.config, job.training.seq_len)
                size = job.training.local_batch_size
                logger.info(pipeline_summary(job.parallelism, sharded.stages, weights, size))
        self.optimizer = build_optimizer(
            job.optimizer, sharded.named_parameters(), self.meshes.group
        )
        self.train_step = TrainStep(sharded, self.optimizer, job.training, device=process.device)
        self.checkpointer = _checkpointer(job, sharded, self.optimizer)
        self.progress = Progress()
        self.losses: tuple[float, float | None] = (math.nan, None)
        """Of the last step, and of the validation after it."""

    def create_seed_checkpoint(self) -> None:
        """Write the initial weights as step-0, from which any layout can start."""
        self.checkpointer.save(0, {})
        self._say("the initial weights are %s", self.checkpointer.folder / "step-0")

    def train(self) -> None:
        """Train to the last step; resumes where the run's own checkpoint ended."""
        self._open_data()
        self._resume()
        steps = self.job.training.steps
        if self.progress.step >= steps:
            self._say(
                "%s is at step %d of training.steps=%d already: raise training.steps to go on, or "
                "choose another job.dump_folder",
                self.checkpointer.folder,
                self.progress.step,
                steps,
            )
            return
        self.checkpointer.check_export(steps)
        self.routing: RoutingTrace | None = None
        if self.job.debug.routing_record is not None or self.job.debug.routing_replay is not None:
            self.routing = RoutingTrace(
                self.job, self.sharded, self.process, resume_step=self.progress.step
            )
        if self.process.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_job(self.job, self.folder / "config.toml")
            facts = run_facts(self.job, self.sharded, self.process, self.loader.identity)
            (self.folder / "run.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
        self.log = RunLog(self.job, self.sharded, self.process, resume_step=self.progress.step)
        if self.job.lr_scheduler.warmup_steps >= steps:
            warmup = self.job.lr_scheduler.warmup_steps
            logger.warning("the run of %d steps ends inside its warm-up of %d", steps, warmup)
        garbage = GarbageCollector(self.job.training.gc_freq)
        first = self.progress.step + 1
        with profiler(self.job.profiling, self.folder, self.process.rank) as profile:
            for step in range(first, steps + 1):
                self._step(step)
                if step == first:
                    self._say_compiled()
                    set_timeouts(self.job.comm.train_timeout_seconds, self.meshes.all_groups())
                garbage.step(step)
                profile.step()
        self.loader.close()
        self.log.close(*loss_unit(self.tokenizer))
        if self.routing is not None:
            self.routing.close()
        self._say_goodbye()

    def _step(self, step: int) -> None:
        phases, training = self.log.phases, self.job.training
        before = self._state()
        with phases("data"), region("data"):
            batches = self.loader.next_step()
        factor = lr_factor(step, self.job.lr_scheduler, training.steps)
        set_lr(self.optimizer, factor)
        capture = self._capture(step) if step == self.job.debug.capture_step else None
        logged = self.log.wants(step) or self._validates(step) or capture is not None
        traced = nullcontext() if self.routing is None else self.routing.step(step, batches)
        with phases("step"), traced:
            result = self.train_step(
                batches,
                logged=logged,
                parameter_norms=self.log.wants_norms(step),
                observer=capture,
            )
        if capture is not None:
            capture.write(self.folder)
        if not result.finite:
            self._handle_nonfinite(step, result, batches, before)
        elif result.rows_dropped and self.sharded.stops_on_overflow:
            self.train_step.discard()
            kept = self._keep(step, before)
            raise RunError(f"step {step}: {overflow_line(self.job, result.rows_dropped)}; {kept}")

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
            rates={group["name"]: group["lr"] for group in self.optimizer.param_groups},
            tokens=self.progress.tokens,
            step_tokens=step_tokens,
            validation_loss=validation_loss,
        )
        with phases("checkpoint"):
            self.checkpointer.maybe_save(step, self._state(), last=step == training.steps)

    def _capture(self, step: int) -> StepCapture:
        training = self.job.training
        wide = training.dtype == "float64"
        compute_dtype = "float64" if wide else training.mixed_precision_param
        return StepCapture(self.sharded, self.optimizer, step=step, compute_dtype=compute_dtype)

    def _handle_nonfinite(
        self, step: int, result: StepResult, batches: list[Batch], before: dict[str, Any]
    ) -> None:
        """Nothing has been updated: skip the step, or keep the state before it and stop."""
        place = describe_nonfinite(self.sharded, batches, self.process.device)
        self.train_step.discard()
        self._take_dropped()  # Of the forward that looked for the place.
        line = f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}: {place}"
        if self.job.training.on_nonfinite == "skip":
            logger.warning("%s; the update is skipped", line)
            return
        kept = self._keep(step, before)
        raise RunError(
            f"{line}; {kept} (training.on_nonfinite='skip' would leave the update out and go on)"
        )

    def _keep(self, step: int, before: dict[str, Any]) -> str:
        """Save the state before a step that updated nothing; says where it is."""
        checkpoint = self.job.checkpoint
        if not checkpoint.enable or checkpoint.load_only or step == 1:
            return "no state was kept"
        if self.checkpointer.last_step != step - 1:
            self.checkpointer.save(step - 1, before)
        return f"the state before it is {self.checkpointer.folder}/step-{step - 1}"

    def _open_data(self) -> None:
        job, dims = self.job, self.meshes.dims
        self.tokenizer = tokenizer = load_tokenizer(job.model.tokenizer_path)
        if lines := check_vocabulary(job, self.sharded.config, tokenizer.vocab_size):
            raise ConfigError(lines)
        rank = dims.coordinate(self.process.rank, "batch")
        num_ranks = dims.size("batch")
        seed = job.debug.seed
        self.loader = build_loader(
            job.training,
            tokenizer,
            seed=seed,
            rank=rank,
            num_ranks=num_ranks,
            global_batch_size=job.training.global_batch_size,
            permutation=job.debug.permute_rows,
        )
        self.validation: ValidationLoader | None = None
        if job.validation.enable:
            self.validation = build_validation(
                job.validation, job.training, tokenizer, seed=seed, rank=rank, num_ranks=num_ranks
            )

    def _resume(self) -> None:
        state = self.checkpointer.load()
        if state is None:
            return
        if "data" in state:
            self.loader.load_state_dict(state["data"])
        if "step" in state:
            self.progress = Progress(state["step"], state["tokens"])
            self._say("going on after step %d", self.progress.step)

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds besides tensors; the learning rate follows from the step."""
        return {
            "step": self.progress.step,
            "tokens": self.progress.tokens,
            "data": self.loader.state_dict(),
        }

    def _validates(self, step: int) -> bool:
        if self.validation is None:
            return False
        return step % self.job.validation.freq == 0 or step == self.job.training.steps

    @torch.no_grad()
    def _validate(self) -> float:
        """Mean cross-entropy over the held-out target tokens of all ranks. Raises RunError where
        buffers between ranks do not suffice and nothing may be left out."""
        assert self.validation is not None
        sums = torch.zeros(3, dtype=torch.float64, device=self.process.device)
        self.sharded.train(False)
        for batch in self.validation:
            local = local_batch(batch, self.sharded, self.process.device)
            sums[0] += self.sharded.execution.evaluate(local)
            sums[1] += num_local_targets(batch, self.sharded)
        self.sharded.train(True)
        sums[2] = self._take_dropped()
        dist.all_reduce(sums)
        loss, targets, dropped = sums.tolist()
        if dropped and self.sharded.stops_on_overflow:
            step = self.progress.step  # Its update is done: what it made is kept.
            kept = self._keep(step + 1, self._state())
            line = overflow_line(self.job, int(dropped))
            raise RunError(f"validation after step {step}: {line}; {kept}")
        return loss / max(targets, 1.0)

    def _take_dropped(self) -> Tensor:
        return take_dropped(self.sharded.moe_layers().values(), self.process.device)

    def _say_compiled(self) -> None:
        if self.job.compile.enable:
            graphs, breaks, seconds = compiled_so_far()
            self._say("torch.compile: %d graphs, %d breaks, %.1f s", graphs, breaks, seconds)

    def _say(self, line: str, *values: object) -> None:
        if self.process.is_main:
            logger.info(line, *values)

    def _say_goodbye(self) -> None:
        """How it went, where everything is, and what to do next."""
        self._say(outcome(self.progress.step, *self.losses, *loss_unit(self.tokenizer)))
        self._say("metrics %s", self.folder / "metrics.jsonl")
        self._say("curves  %s", self.folder / "curves.png")
        last, checkpoint = self.checkpointer.last_step, self.job.checkpoint
        if last is not None:
            self._say("checkpoints %s", self.checkpointer.folder)
        following = next_steps(
            self.folder,
            checkpoint=None if last is None else self.checkpointer.folder / f"step-{last}",
            resumable=not checkpoint.last_save_model_only,
            steps=self.job.training.steps,
            prompt="def " if self.job.training.dataset == "stdlib" else "The",
            launch=self.process,
            environment=os.environ,
        )
        self._say("%s", following)


def overflow_line(job: JobConfig, rows_dropped: int) -> str:
    """What to tell a user whose bounded buffers do not suffice."""
    factor = job.parallelism.expert_parallel_capacity_factor
    return (
        f"{rows_dropped} choices of an expert by a token found no room between ranks with "
        f"parallelism.expert_parallel_capacity_factor={factor}: choose a larger one, leave it out "
        f"for exact sizes, or set parallelism.expert_parallel_overflow=drop"
    )


def _checkpointer(
    job: JobConfig, sharded: ShardedModel, optimizer: torch.optim.Optimizer
) -> Checkpointer:
    moe = sharded.config.moe
    return Checkpointer(
        job.checkpoint,
        Path(job.job.dump_folder),
        modules=sharded.parts,
        optimizer=optimizer,
        num_experts=moe.num_experts if moe is not None else 0,
        job_record=job.model_dump(mode="json"),
        merge_data=merge_states,
        model=HFModel(job.model.name, sharded.config),
    )


def train(job: JobConfig, model_config: ModelConfig, process: Process) -> None:
    """Run a resolved job on this rank: write its seed checkpoint, or train it."""
    trainer = Trainer(job, model_config, process)
    if job.checkpoint.create_seed_checkpoint:
        trainer.create_seed_checkpoint()
    else:
        trainer.train()
