"""What one rank of a run reads, in whatever layout and training stage the run is."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from titan_moe.config.checks.data import check_vocabulary
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.config.stages import job_of_step, stage_jobs
from titan_moe.data.bad_documents import BadDocuments, add_parts, counted
from titan_moe.data.batch import Batch
from titan_moe.data.build import build_reader, build_validation, source_names
from titan_moe.data.loader import Loader, Reader
from titan_moe.data.position import check_position
from titan_moe.data.reader_process import ReaderProcess
from titan_moe.data.step_reader import Identity, bad_documents, continue_state, merge_states
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.data.validation import ValidationLoader
from titan_moe.distributed.agreement import from_every_rank
from titan_moe.distributed.parallel_dims import ParallelDims
from titan_moe.models.config import ModelConfig
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.process import Process

logger = logging.getLogger(__name__)


class _BadDocumentLog:
    """Counts the bad documents of all ranks, and says so on the main one."""

    def __init__(self, sources: Sequence[str], process: Process) -> None:
        self._sources = sources
        self._process = process
        self._totals = [BadDocuments()] * len(sources)
        self._said = [0] * len(sources)

    def count(self, step: int, state: dict[str, Any], *, mine: bool) -> int:
        """Those of all sources; collective. Those of a source are said at the first of them, and
        whenever they are twice as many as when they were last said.

        Args:
            state: the loader's.
            mine: whether this rank counts what it reads; of those that read the same, one does.
        """
        read, before = bad_documents(state, len(self._sources))
        numbers = torch.tensor([part.number * mine for part in read], device=self._process.device)
        dist.all_reduce(numbers)
        totals = [n + part.number for n, part in zip(numbers.tolist(), before, strict=True)]
        due = [n > 0 and n >= 2 * said for n, said in zip(totals, self._said, strict=True)]
        firsts = [total.first for total in self._totals]
        if any(due):
            examples: list[Any] = [None] * self._process.world_size
            dist.all_gather_object(examples, [part.first for part in add_parts(before, read)])
            found = [next(filter(None, part), "") for part in zip(*examples, strict=True)]
            firsts = [first or new for first, new in zip(firsts, found, strict=True)]
        self._totals = list(map(BadDocuments, totals, firsts))
        for part, is_due in enumerate(due):
            if is_due:
                self._said[part] = totals[part]
                self._say(f"by step {step}", part)
        return sum(totals)

    def say_all(self) -> None:
        """At the end of the run."""
        for part, total in enumerate(self._totals):
            if total.number:
                self._say("in all", part)

    def _say(self, when: str, part: int) -> None:
        if self._process.is_main:
            words = counted(self._totals[part])
            logger.warning("%s, %s: %s", self._sources[part], when, words)


class TrainData:
    """This rank's loaders; `job` is that of the whole run."""

    def __init__(self, job: JobConfig, config: ModelConfig, process: Process) -> None:
        self._job = job
        self._process = process
        self.tokenizer = load_tokenizer(job.model.tokenizer_path)
        if lines := check_vocabulary(job, config, self.tokenizer.vocab_size):
            raise ConfigError(lines)
        self._bad = _BadDocumentLog(source_names(job.training), process)

    def open(self, job: JobConfig, dims: ParallelDims) -> None:
        """From the beginning of the data, for the stage and the layout of `job`."""
        rank = self._process.rank
        self._counts = not any(dims.coordinate(rank, axis) for axis in ("tp", "cp", "pp"))
        place = {
            "seed": job.debug.seed,
            "rank": dims.coordinate(rank, "batch"),
            "num_ranks": dims.size("batch"),
        }
        self.loader = self._open_loader(
            job,
            global_batch_size=job.training.global_batch_size,
            largest_batch_size=max(
                stage.training.global_batch_size for _, stage in stage_jobs(self._job)
            ),
            permutation=job.debug.permute_rows,
            validation=job.validation,
            **place,
        )
        self.validation: ValidationLoader | None = None
        if job.validation.enable:
            self.validation = build_validation(
                job.validation, job.training, self.tokenizer, **place
            )
            # Files of tokens are read as they are: there is no work to divide.
            if (job.validation.dataset or job.training.dataset) != "tokens":
                self.validation.gather = lambda encode, *turn: from_every_rank(
                    lambda: list(encode(*turn, rank)),
                    doing="reading the dataset for validation failed",
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

    def next_step(self, step: int) -> list[Batch]:
        """The microbatches that a step of the run reads. RunError as Loader.next_step; where the
        run went back and left batches out, the reader counts others than the run."""
        try:
            return self.loader.next_step()
        except RunError as error:
            batch = self.loader.state_dict()["step"] + 1
            words = str(error).removeprefix(f"step {batch}: ")
            if batch == step or words == str(error):
                raise
            raise RunError(
                f"step {step}, batch {batch} of the data with those that were left out: {words}"
            ) from error

    def count_bad_documents(self, step: int) -> int:
        """Those of all ranks and sources up to a step; collective."""
        return self._bad.count(step, self.loader.state_dict(), mine=self._counts)

    def close(self) -> None:
        """End the loader, and say what was wrong with the data."""
        self.loader.close()
        self._bad.say_all()

    def load_state(self, state: dict[str, Any], step: int | None = None) -> None:
        """Go on at a checkpoint's position, taken after a step of the run: left out, that of the
        data, which is another if the run has gone back and left data out. RunError if it is that of
        other data, or of a stage that the run did not have at that step."""
        check_position(state)
        taken = job_of_step(self._job, state["step"] if step is None else step).training
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
