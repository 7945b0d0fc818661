"""The data that one rank of a run reads, in the run's current layout and training stage."""

import logging
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch.distributed as dist

from titan_moe.checks.data import check_vocabulary
from titan_moe.comm.process import Process
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.data.build import build_reader, build_validation, measure_conversations
from titan_moe.data.check import data_notes, few_held_out
from titan_moe.data.loader import Loader, ReaderProcess, StepReader, continue_state, merge_states
from titan_moe.data.packed_conversations import Lengths
from titan_moe.data.sources import training_sources
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.data.validation import ValidationLoader
from titan_moe.distributed.agreement import from_every_rank
from titan_moe.parallelize.plan import Plan
from titan_moe.prepare.load_checks import continue_data

logger = logging.getLogger(__name__)


class TrainData:
    """This rank's loaders, at the beginning of the data."""

    def __init__(self, run_job: JobConfig, plan: Plan, process: Process) -> None:
        """`run_job`: the whole run's configuration; `plan`: that of the present stage. Collective.
        Raises ConfigError or RunError."""
        self._run_job, job = run_job, plan.job
        self._process = process
        self.tokenizer = load_tokenizer(job.model.tokenizer_path, job.training)
        if lines := check_vocabulary(job, plan.config, self.tokenizer.vocab_size):
            raise ConfigError(lines)
        for line in data_notes(job.training, job.validation) if process.is_main else []:
            logger.info(line)
        self._open(plan)
        if self.validation and process.is_main:
            for line in few_held_out(self.validation, job.validation):
                logger.warning(line)

    def _open(self, plan: Plan) -> None:
        """Open the loaders at the beginning of the data; collective.

        Beside a GPU, whose kernels this process launches, a child process reads. The child's start
        takes seconds, so a run on the CPU reads in this process.
        """
        job, training, tokenizer_path = plan.job, plan.job.training, plan.job.model.tokenizer_path
        rank, on_gpu = self._process.rank, self._process.device.type == "cuda"
        place = {
            "seed": job.debug.seed,
            "rank": plan.dims.coordinate(rank, "batch"),
            "num_ranks": plan.dims.size("batch"),
        }
        reads: dict[str, Any] = place | {
            "permutation": job.debug.permute_rows,
            "validation": job.validation,
        }
        if self.tokenizer.conversations is not None:
            reads["lengths"] = self._lengths(job)
        reader: StepReader | ReaderProcess
        if on_gpu:
            reader = ReaderProcess(build_reader, training, tokenizer_path, job.job.imports, **reads)
        else:
            reader = build_reader(training, self.tokenizer, **reads)
        self.loader = Loader(
            reader,
            prefetch_factor=training.dataloader.prefetch_factor,
            pin_for=self._process.device if on_gpu else None,
        )
        self.validation: ValidationLoader | None = None
        if job.validation.enable:
            self.validation = build_validation(job.validation, training, self.tokenizer, **place)

    def _lengths(self, job: JobConfig) -> list[np.ndarray]:
        """The lengths of each source's conversations, of which each rank tokenizes a part;
        collective. ConfigError if no conversation has a role that is to be learned."""
        training, process = job.training, self._process
        conversations = self.tokenizer.conversations
        assert conversations is not None

        def measure_part() -> tuple[list[Lengths], set[str], set[str]]:
            how = {"seed": job.debug.seed, "part": process.rank, "parts": process.world_size}
            lengths = measure_conversations(training, self.tokenizer, **how)
            return lengths, conversations.unseen_roles, conversations.unread_flags

        doing = "reading the conversations failed"
        parts, unseen, flags = zip(*from_every_rank(measure_part, doing=doing), strict=True)
        if missing := sorted(set.intersection(*unseen)):
            key = f"training.messages.targets={training.messages.targets!r}"
            line = f"{key}: no conversation has the role {missing[0]!r}: leave it out, or mend it"
            raise ConfigError(line)
        conversations.unread_flags |= set.union(*flags)
        lines, found = conversations.notes(), []
        for source, *lengths in zip(training_sources(training), *parts, strict=True):
            whole = reduce(add, lengths)
            found.append(whole.tokens)
            lines += whole.lines(source.name, len(found[-1]), conversations.max_refused)
        for line in lines if process.is_main else []:
            logger.warning(line)
        return found

    def end_with_epochs(self, job: JobConfig, resume_step: int) -> JobConfig:
        """Returns `job` with the steps of training.epochs, if training.steps are more. What is left
        is counted from the resumed position: other epochs were packed otherwise."""
        training, left = job.training, self.loader.count_steps()
        steps = resume_step + left
        if self._process.is_main and left:
            line = "training.epochs=%d: the data end with step %d"
            ends = "" if steps <= training.steps else f", training.steps={training.steps} before"
            logger.info(line + ends, training.epochs, steps)
        fewer = training.model_copy(update={"steps": min(steps, training.steps)})
        return job.model_copy(update={"training": fewer})

    def limit(self, job: JobConfig) -> str:
        """Returns the key, and its value, that ends the run here."""
        of_steps = job.training.epochs is None or self.loader.count_steps() > 0
        key = "steps" if of_steps else "epochs"
        return f"training.{key}={getattr(job.training, key)}"

    def reopen(self, plan: Plan) -> None:
        """Open the loaders for another stage or layout, where all ranks' data is; collective."""
        states: list[Any] = [None] * self._process.world_size
        dist.all_gather_object(states, self.loader.state_dict())
        before = self.loader.identity
        self.loader.close()
        self._open(plan)
        state = continue_state(merge_states(states), before, self.loader.identity)
        self.loader.load_state_dict(state)

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on at a checkpoint's position. RunError if the position is one of other data, or of a
        stage that the run did not have at that step."""
        self.loader.load_state_dict(continue_data(self._run_job, state, self.loader.identity))
