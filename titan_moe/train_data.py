"""What one rank of a run reads, in whatever layout and training stage the run is."""

import logging
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from titan_moe.config.checks.data import check_vocabulary
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.config.stages import job_of_step, stage_jobs
from titan_moe.data.build import build_reader, build_validation
from titan_moe.data.loader import Loader, Reader
from titan_moe.data.reader_process import ReaderProcess
from titan_moe.data.step_reader import Identity, continue_state, merge_states
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.data.validation import ValidationLoader
from titan_moe.distributed.parallel_dims import ParallelDims
from titan_moe.models.config import ModelConfig
from titan_moe.runtime.process import Process

logger = logging.getLogger(__name__)


class TrainData:
    """This rank's loaders; `job` is that of the whole run."""

    def __init__(self, job: JobConfig, config: ModelConfig, process: Process) -> None:
        self._job = job
        self._process = process
        self.tokenizer = load_tokenizer(job.model.tokenizer_path)
        if lines := check_vocabulary(job, config, self.tokenizer.vocab_size):
            raise ConfigError(lines)

    def open(self, job: JobConfig, dims: ParallelDims) -> None:
        """From the beginning of the data, for the stage and the layout of `job`."""
        place = {
            "seed": job.debug.seed,
            "rank": dims.coordinate(self._process.rank, "batch"),
            "num_ranks": dims.size("batch"),
        }
        self.loader = self._open_loader(
            job,
            global_batch_size=job.training.global_batch_size,
            largest_batch_size=max(
                stage.training.global_batch_size for _, stage in stage_jobs(self._job)
            ),
            permutation=job.debug.permute_rows,
            **place,
        )
        self.validation: ValidationLoader | None = None
        if job.validation.enable:
            self.validation = build_validation(
                job.validation, job.training, self.tokenizer, **place
            )

    def _open_loader(self, job: JobConfig, **place: Any) -> Loader:
        """Beside a GPU, whose kernels this process launches, another process reads. Its start takes
        seconds, which a run on the CPU is spared."""
        on_gpu = self._process.device.type == "cuda"
        reader: Reader
        if on_gpu:
            reader = ReaderProcess(job.training, job.model.tokenizer_path, **place)
        else:
            reader = build_reader(job.training, self.tokenizer, **place)
        return Loader(
            reader,
            prefetch_factor=job.training.dataloader.prefetch_factor,
            pin_for=self._process.device if on_gpu else None,
        )

    def reopen(self, job: JobConfig, dims: ParallelDims) -> None:
        """For another stage or layout, from where all ranks' loaders are; collective."""
        states: list[Any] = [None] * self._process.world_size
        dist.all_gather_object(states, self.loader.state_dict())
        before = self.loader.identity
        self.loader.close()
        self.open(job, dims)
        self._go_on(merge_states(states), before)

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on at a checkpoint's position. RunError if it is that of other data, or of a stage
        that the run did not have at that step."""
        taken = job_of_step(self._job, state["step"]).training
        size, length = taken.global_batch_size, taken.seq_len
        self._go_on(state, replace(self.loader.identity, global_batch_size=size, seq_len=length))

    def _go_on(self, state: dict[str, Any], saved: Identity) -> None:
        """From a position of all ranks, taken under `saved`."""
        position, unread = continue_state(state, saved, self.loader.identity)
        self.loader.load_state_dict(position)
        if any(unread) and self._process.is_main:
            logger.info(
                "new sequences begin after the last document that was begun: %d tokens of such "
                "documents, and %d whole documents before it, are left unread",
                *unread,
            )
