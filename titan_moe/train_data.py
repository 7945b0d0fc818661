"""The data that one rank of a run reads, in the run's current layout and training stage."""

import logging
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from titan_moe.config.checks.data import check_vocabulary
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.config.training_stages import job_of_step
from titan_moe.data.build import build_reader, build_validation, data_notes
from titan_moe.data.loader import Loader
from titan_moe.data.reader import StepReader, continue_state, merge_states
from titan_moe.data.reader_process import ReaderProcess
from titan_moe.data.sequences import Identity
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.data.validation import ValidationLoader
from titan_moe.distributed.parallel_dims import ParallelDims
from titan_moe.models.config import ModelConfig
from titan_moe.runtime.process import Process

logger = logging.getLogger(__name__)


class TrainData:
    """This rank's loaders."""

    def __init__(self, job: JobConfig, config: ModelConfig, process: Process) -> None:
        self._job = job
        self._process = process
        self.tokenizer = load_tokenizer(job.model.tokenizer_path, job.training)
        if lines := check_vocabulary(job, config, self.tokenizer.vocab_size):
            raise ConfigError(lines)
        for line in data_notes(job.training, job.validation) if process.is_main else []:
            logger.info(line)

    def open(self, job: JobConfig, dims: ParallelDims) -> None:
        """Open the loaders at the beginning of the data, for the stage and the layout of `job`."""
        rank = self._process.rank
        place = {
            "seed": job.debug.seed,
            "rank": dims.coordinate(rank, "batch"),
            "num_ranks": dims.size("batch"),
        }
        self.loader = self._open_loader(
            job,
            global_batch_size=job.training.global_batch_size,
            permutation=job.debug.permute_rows,
            validation=job.validation,
            **place,
        )
        self.validation: ValidationLoader | None = None
        if job.validation.enable:
            self.validation = build_validation(
                job.validation, job.training, self.tokenizer, **place
            )

    def _open_loader(self, job: JobConfig, **place: Any) -> Loader:
        """Open a loader that reads in a child process beside a GPU, whose kernels this process
        launches. The child's start takes seconds, so a run on the CPU reads in this process."""
        on_gpu = self._process.device.type == "cuda"
        reader: StepReader | ReaderProcess
        if on_gpu:
            imports = job.job.imports
            reader = ReaderProcess(job.training, job.model.tokenizer_path, imports, **place)
        else:
            reader = build_reader(job.training, self.tokenizer, **place)
        return Loader(
            reader,
            prefetch_factor=job.training.dataloader.prefetch_factor,
            pin_for=self._process.device if on_gpu else None,
        )

    def reopen(self, job: JobConfig, dims: ParallelDims) -> None:
        """Open the loaders for another stage or layout, where all ranks' data is; collective."""
        states: list[Any] = [None] * self._process.world_size
        dist.all_gather_object(states, self.loader.state_dict())
        before = self.loader.identity
        self.loader.close()
        self.open(job, dims)
        state = continue_state(merge_states(states), before, self.loader.identity)
        self.loader.load_state_dict(state)

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on at a checkpoint's position. RunError if the position is one of other data, or of a
        stage that the run did not have at that step."""
        self.loader.load_state_dict(continue_data(self._job, state, self.loader.identity))


def continue_data(job: JobConfig, state: dict[str, Any], identity: Identity) -> dict[str, Any]:
    """Returns a checkpoint's data position for a loader of `identity`. RunError if it is one of
    other data, or of a stage that the run did not have at that step."""
    taken = job_of_step(job, state["step"]).training
    size, length = taken.global_batch_size, taken.seq_len
    return continue_state(
        state, replace(identity, global_batch_size=size, seq_len=length), identity
    )
