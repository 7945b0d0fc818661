"""A run's steps made again, one after the other, on one plain process."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.optim import Optimizer

from titan_moe.checkpoint.checkpointer import Checkpointer
from titan_moe.checkpoint.train_state import DATA, read_train_state
from titan_moe.config.stages import job_of_step
from titan_moe.data.batch import Batch
from titan_moe.data.position import check_position
from titan_moe.data.step_reader import Identity, merge_states
from titan_moe.data.tokenizer import Tokenizer
from titan_moe.debug.why.run import Run
from titan_moe.distributed.parallel_dims import parallel_dims
from titan_moe.distributed.parallelize import ShardedModel, build_sharded_model
from titan_moe.distributed.policies import compute_dtype, resolve_model, stored_dtype
from titan_moe.models.config import ModelConfig
from titan_moe.models.hf import HFModel, model_of_job
from titan_moe.models.stats import part_sizes
from titan_moe.optim.optimizers import build_optimizer
from titan_moe.optim.schedules import lr_factor, set_lr
from titan_moe.runtime.device import memory_of
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.lean_start import leave_compiler_out
from titan_moe.runtime.process import Process, seed_everything
from titan_moe.train_data import TrainData
from titan_moe.train_step import StepResult, TrainStep

_GIB = 2**30


class Repetition:
    """The model, its optimizer and its data where the run's checkpoint left them.

    The data is opened and compared with the checkpoint's first: it is found out in a second.
    """

    def __init__(self, run: Run, process: Process, say: Callable[[str], None]) -> None:
        """Raises ConfigError or RunError in lines for the user."""
        leave_compiler_out()
        self._run, self._process = run, process
        self._job = job_of_step(run.job, run.first)
        seed_everything(self._job.debug)
        config = model_of_job(run.job.model)
        self._data = TrainData(run.job, config, process)
        self._dims = parallel_dims(self._job.parallelism, 1)
        self._data.open(self._job, self._dims)
        self._optimizer: Optimizer | None = None
        self.step = 0
        """The last one that was made."""
        try:
            self._begin(config, say)
        except BaseException:
            self.close()
            raise

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's."""
        return self._data.tokenizer

    def read(self) -> list[Batch]:
        """The microbatches of the next step. RunError when the data ran out or cannot be read."""
        job = job_of_step(self._run.job, self.step + 1)
        if job.training != self._job.training:  # A training stage begins.
            self._job = job
            self._data.reopen(job, self._dims)
        return self._data.next_step(self.step + 1)

    def train(self, batches: list[Batch]) -> StepResult | None:
        """Make the next step, of which one that is not finite updates nothing; None for one that
        the run left out."""
        assert self._optimizer is not None
        self.step += 1
        if self.step in self._run.decisions.skipped:
            return None
        job = self._job
        set_lr(self._optimizer, lr_factor(self.step, job.lr_scheduler, job.training.steps))
        device = self._process.device
        train_step = TrainStep(self.sharded, self._optimizer, job.training, device=device)
        result = train_step(batches, parameter_norms=True)
        train_step.discard()
        return result

    def drop_optimizer(self) -> None:
        """Free its state: no further step is made."""
        self._optimizer = None

    def close(self) -> None:
        """End the data's threads."""
        self._data.loader.close()

    def _begin(self, config: ModelConfig, say: Callable[[str], None]) -> None:
        """The model and its optimizer, where the checkpoint left them."""
        run, device = self._run, self._process.device
        if run.checkpoint is not None and run.first > 1:
            _check_data(run.checkpoint, self._data.loader.identity)
        trains = run.first < run.step
        _check_memory(run, config, device, trains=trains)
        say(f"step {run.step} from {run.checkpoint or 'the beginning of the run'}")
        draw = run.checkpoint is None
        self.sharded: ShardedModel = build_sharded_model(
            self._job, config, device=device, world_size=1, draw_weights=draw
        )
        if trains:
            named, group = self.sharded.named_parameters(), self.sharded.meshes.group
            self._optimizer = build_optimizer(self._job.optimizer, named, group)
        self._load()

    def _load(self) -> None:
        moe = self.sharded.config.moe
        checkpointer = Checkpointer(
            self._job.checkpoint,
            self._run.folder,
            modules=self.sharded.parts,
            optimizer=self._optimizer,
            num_experts=moe.num_experts if moe is not None else 0,
            job_record=self._run.job.model_dump(mode="json"),
            merge_data=merge_states,
            model=HFModel(self._run.job.model.name, self.sharded.config),
        )
        state = checkpointer.load() or {}
        if DATA in state:
            self._data.load_state(state[DATA])
        self.step = state.get("step", 0)
        for _ in range(self._run.decisions.left_out):
            self._data.loader.next_step()


def _check_data(checkpoint: Path, ours: Identity) -> None:
    """RunError where the data is not what the run read: its steps cannot be made again then."""
    saved = read_train_state(checkpoint)[DATA]
    check_position(saved)
    theirs = Identity(**saved["identity"])
    for what in ("fingerprint", "seed", "checksum"):
        then, now = getattr(theirs, what), getattr(ours, what)
        if then not in ("", now):
            raise RunError(
                f"the data is not what the run read: its {what} was {then!r} and is {now!r}: put "
                "the files and the tokenizer back as they were, or no step can be made again"
            )


def _check_memory(run: Run, config: ModelConfig, device: torch.device, *, trains: bool) -> None:
    """RunError where parameters, gradients and the optimizer's moments do not fit; after the last
    update a copy of the gradients takes the moments' place."""
    size = sum(s.dense + s.routed for s in part_sizes(resolve_model(config, run.job)).values())
    stored, computed = (dtype.itemsize for dtype in (stored_dtype(run.job), compute_dtype(run.job)))
    needed = size * (stored * (4 if trains else 3) + (computed if computed != stored else 0))
    free = memory_of(device) or _free_memory()
    if free is not None and needed > free:
        raise RunError(
            f"the whole model on one process needs {needed / _GIB:,.0f} GiB before any activation, "
            f"and {free / _GIB:,.0f} GiB are there: use a machine, or a device, with more memory "
            "(CUDA_VISIBLE_DEVICES= leaves GPUs out)"
        )


def _free_memory() -> int | None:
    """Bytes of this machine's memory that are not in use; None where that is not known."""
    known = Path("/proc/meminfo")
    lines = known.read_text().splitlines() if known.is_file() else []
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None
