"""One rank's run in a fake world: the program's own loop, with data, validation and checkpoints.

What is other than in training: the documents are made up; a step takes the first microbatches
alone; saves, loads and comparisons of replicas are of small tensors with values (small_state.py).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from titan_moe.checkpoint.checkpointer import Checkpointer
from titan_moe.checkpoint.replicas import ReplicaCheck
from titan_moe.config.job_config import Debug, JobConfig, Profiling
from titan_moe.data.batch import Batch
from titan_moe.data.step_reader import merge_states
from titan_moe.distributed.context_parallel.apply import local_positions
from titan_moe.distributed.parallel_dims import parallel_dims
from titan_moe.distributed.process_groups import ProcessGroups
from titan_moe.metrics.run_log import RunLog
from titan_moe.models.config import ModelConfig
from titan_moe.models.hf import HFModel
from titan_moe.optim.optimizers import build_optimizer
from titan_moe.runtime.position import POSITION
from titan_moe.runtime.process import Process
from titan_moe.simulate.comm_counter import axes_of_groups
from titan_moe.simulate.fake_rank import CPU, FakeRank
from titan_moe.simulate.issued import RecordingRank
from titan_moe.simulate.late_writer import LateSaves
from titan_moe.simulate.routings import LayerOfRank, Routing, without_targets
from titan_moe.simulate.small_state import small_modules
from titan_moe.simulate.whereabouts import Whereabouts
from titan_moe.train_data import TrainData
from titan_moe.train_step import StepResult, TrainStep
from titan_moe.trainer import Trainer

LATER_STEP = 6
"""The step with all that a run does every so many steps; while it is saved, one follows."""
LAST_STEP = 10 * LATER_STEP
_LARGEST_TOKENIZER = 1 << 16


def happens_later(job: JobConfig) -> list[str]:
    """What a job does every so many steps, in words."""
    wanted = {
        "validation": job.validation.enable,
        "replicas": job.metrics.replica_check_freq > 0,
        "save": _saves(job),
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]


def saves_in_background(job: JobConfig) -> bool:
    """Whether steps go on while a checkpoint is written."""
    return _saves(job) and job.checkpoint.async_mode != "disabled"


def ends_otherwise(job: JobConfig) -> bool:
    """Whether the last save is not as those before."""
    checkpoint = job.checkpoint
    others = checkpoint.last_save_in_hf or checkpoint.last_save_model_only
    return _saves(job) and (others or saves_in_background(job))


def _saves(job: JobConfig) -> bool:
    return job.checkpoint.enable and not job.checkpoint.load_only


def _job_of_run(job: JobConfig, world_size: int, folder: Path) -> JobConfig:
    """With made-up documents, what happens later in one step, and nothing that leaves a trace."""
    training = job.training
    num_data_ranks = parallel_dims(job.parallelism, world_size).size("batch")
    microbatch = training.local_batch_size * num_data_ranks
    made_up = {"dataset": "synthetic", "dataset_path": None, "text_column": "text"}
    changes: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": str(folder), "print_config": False},
        "model": {"tokenizer_path": "bytes"},
        "metrics": {
            "log_freq": LATER_STEP,
            "replica_check_freq": LATER_STEP if job.metrics.replica_check_freq else 0,
            "log_expert_counts": False,
            **dict.fromkeys(("enable_tensorboard", "enable_wandb", "enable_mlflow"), False),
        },
        "training": {
            **made_up,
            "blend": [],
            "global_batch_size": microbatch * min(2, training.global_batch_size // microbatch),
            "dataloader": training.dataloader.model_copy(update={"prefetch_factor": 1}),
            "steps": LAST_STEP,
            "max_seconds": 0,
        },
        # A whole batch, and one of which the first data rank alone has documents.
        "validation": {**made_up, "freq": LATER_STEP, "steps": num_data_ranks + 1},
        "checkpoint": {
            "interval": LATER_STEP,
            "enable": _saves(job),
            "load_step": -1,
            "exclude_from_loading": [],
            "initial_load_path": None,
            "initial_load_in_hf": False,
            **dict.fromkeys(("enable_first_step_checkpoint", "create_seed_checkpoint"), False),
        },
    }
    tables = {name: getattr(job, name).model_copy(update=each) for name, each in changes.items()}
    plain = {"debug": Debug(seed=job.debug.seed), "profiling": Profiling()}
    return job.model_copy(update=tables | plain)


class SimulatedRun(Trainer):
    """A run in a fake world that exists already; its steps are made by `make_step`."""

    def __init__(
        self,
        job: JobConfig,
        config: ModelConfig,
        folder: Path,
        recorder: RecordingRank,
        whereabouts: Whereabouts,
    ) -> None:
        """Build, and begin as a run does. `folder`: the same on all ranks, and empty."""
        self._whole_job = job
        self._recorder, self._whereabouts = recorder, whereabouts
        rank, world_size = dist.get_rank(), dist.get_world_size()
        place = {"local_rank": rank, "local_world_size": world_size}
        process = Process(rank=rank, world_size=world_size, device=CPU, **place)
        super().__init__(_job_of_run(job, world_size, folder), config, process)
        with recorder:
            # The tokenizer has more tokens than a model of a gate; nothing is looked up.
            config = replace(self.sharded.config, vocab_size=_LARGEST_TOKENIZER)
            self.data = TrainData(self.run_job, config, process)
            self.data.open(self.job, self.meshes.dims)
            self.resume()
            self.log = RunLog(self.run_job, self.sharded, process, resume_step=0)

    def _lay_out(self, job: JobConfig, groups: ProcessGroups | None = None) -> None:
        self.job, self._ran = job, True
        self.sharded = FakeRank(self._whole_job, self._config, self._recorder).sharded
        self.meshes = self.sharded.meshes
        self._recorder.groups = axes_of_groups(self.meshes)

    def _prepare_updates(self) -> None:
        job, sharded, group = self.job, self.sharded, self.meshes.group
        with self._recorder:
            self.optimizer = build_optimizer(job.optimizer, sharded.named_parameters(), group)
            self.train_step: _Step = _Step(sharded, self.optimizer, job.training, device=CPU)
            states = [part.state_dict(keep_vars=True) for part in sharded.parts]
        small = small_modules(states)
        named = (pair for module in small for pair in module.named_parameters())
        optimizer = build_optimizer(job.optimizer, named, group)
        freq = job.metrics.replica_check_freq
        self.replicas = ReplicaCheck(small, sharded.config, optimizer, freq)
        moe = sharded.config.moe
        self.checkpointer = _CheckpointerOfValues(
            job.checkpoint,
            self.folder,
            modules=small,
            optimizer=optimizer,
            num_experts=moe.num_experts if moe is not None else 0,
            job_record=self.run_job.model_dump(mode="json"),
            merge_data=merge_states,
            model=HFModel(job.model.name, sharded.config),
        )
        self.checkpointer.recorder = self._recorder

    def make_step(self, step: int, routing: Routing, num_microbatches: int) -> None:
        """Step, and what the program does after it, under a routing."""
        for layer, moe in self.sharded.moe_layers().items():
            about = LayerOfRank(self.process.rank, layer, moe.config.num_experts, moe.config.top_k)
            moe.routing_fn = routing.choice(about)
        self.train_step.num_microbatches = num_microbatches
        self.train_step.hidden_S = self._hidden() if routing.masks_a_rank else None
        with self._whereabouts.watching(self.sharded.parts), self._recorder:
            self._step(step)
        assert self.progress.step == step, "the step has updated nothing"

    def _hidden(self) -> Tensor | None:
        """What the first data rank's first part of a sequence holds, on the ranks that read it."""
        dims, job = self.meshes.dims, self.job
        if dims.coordinate(self.meshes.rank, "batch"):
            return None
        balanced = dims.cp > 1 and job.parallelism.context_parallel_load_balancer == "headtail"
        return local_positions(job.training.seq_len, dims.cp, 0, balanced=balanced)

    def resume(self) -> None:
        """Go on from the run's own checkpoint, if there is one; one that is being written is waited
        for."""
        POSITION.enter_phase("start")
        with self._recorder:
            self.checkpointer.finish()
            self._resume()


class _Step(TrainStep):
    """Takes fewer microbatches than there are, and hides targets."""

    num_microbatches = 1
    hidden_S: Tensor | None = None
    """Positions without targets."""

    def __call__(self, batches: list[Batch], **how: Any) -> StepResult:
        batches = batches[: self.num_microbatches]
        if self.hidden_S is not None:
            batches = [without_targets(batch, self.hidden_S) for batch in batches]
        return super().__call__(batches, **how)


class _CheckpointerOfValues(Checkpointer):
    """Saves and loads tensors that have values."""

    background_saves = LateSaves
    recorder: RecordingRank

    def maybe_save(self, *arguments: Any, **keywords: Any) -> bool:
        with self.recorder.with_values():
            return super().maybe_save(*arguments, **keywords)

    def load(self, step: int | None = None) -> dict[str, Any] | None:
        with self.recorder.with_values():
            return super().load(step)
