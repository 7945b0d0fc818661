"""A checkpoint of one rank on a GPU that is not there: saved, loaded, exported and imported.

The world has this rank alone, so that a checkpoint is whole: exchanges between hosts' memories are
gloo's own, and files are written and read. Floats have no values, so zeros are written for them;
checksums run on the device, and what they come to is not looked at.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from scripts.rehearsal.cases import Case, in_layout
from scripts.rehearsal.fake_cuda import CUDA, FakeCuda, fake_cuda, value_of
from scripts.rehearsal.ledger import Finding
from scripts.rehearsal.places import CHECKPOINT_MOVES
from scripts.rehearsal.rank import refused
from titan_moe.checkpoint import checkpointer as module
from titan_moe.checkpoint.checkpointer import Checkpointer
from titan_moe.checkpoint.hf import write_folder
from titan_moe.distributed.parallelize import build_sharded_model
from titan_moe.models.hf import HFModel
from titan_moe.optim.optimizers import build_optimizer
from titan_moe.runtime.errors import RunError

NAME = "checkpoint on one rank"
_aten = torch.ops.aten
_FAMILY = "deepseek_v3"


class Saving(FakeCuda):
    """The host's tensors are real; floats that come to it from the device are zeros."""

    def execute(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        wanted = torch.device(kwargs.get("device") or "cpu")
        on_host = not any(x.is_cuda or isinstance(x, FakeTensor) for x in tensors)
        if wanted.type == "cpu" and on_host:
            return func(*args, **kwargs)
        result = super().execute(func, args, kwargs)
        if func is _aten._to_copy.default and isinstance(result, FakeTensor) and not result.is_cuda:
            value = value_of(result)
            return torch.zeros(result.shape, dtype=result.dtype) if value is None else value
        return result


def rehearse_checkpoint() -> list[Finding]:
    """What was found. In a fresh process."""
    torch.set_num_threads(1)
    case = next(iter(in_layout(_FAMILY, "dp_shard=1")))
    with _alone(), fake_cuda(Saving()) as mode, tempfile.TemporaryDirectory() as folder:
        try:
            for act in _acts(case, Path(folder)):
                mode.ledger.begin_step()
                with _sums_on_device():
                    act()
                mode.ledger.end_step()
                mode.ledger.findings += _moves(mode)
        except Exception as error:  # Whatever is refused is a finding.
            mode.ledger.findings.append(refused(error))
        return list(dict.fromkeys(mode.ledger.findings))


def _moves(mode: FakeCuda) -> Iterator[Finding]:
    for kind, events in (("copy", mode.ledger.copies), ("wait", mode.ledger.waits)):
        for (place, what), calls in events.items():
            if place.where not in CHECKPOINT_MOVES:
                yield Finding(kind, place, f"{what}, {calls} x, as a checkpoint is saved or loaded")


def _acts(case: Case, folder: Path) -> Sequence[Callable[[], object]]:
    """What a run does with checkpoints, one after the other."""
    job = case.resolved()
    checkpoint = job.checkpoint.model_copy(update={"enable": True})
    sharded = build_sharded_model(
        job, case.config, device=CUDA, world_size=1, ranks_per_node=1, draw_weights=False
    )
    optimizer = build_optimizer(job.optimizer, sharded.named_parameters(), sharded.meshes.group)
    moe = sharded.config.moe
    model = HFModel(job.model.name, sharded.config)

    def of(folder: Path, **options: Any) -> Checkpointer:
        return Checkpointer(
            checkpoint.model_copy(update=options),
            folder,
            modules=sharded.parts,
            optimizer=optimizer,
            num_experts=moe.num_experts if moe is not None else 0,
            job_record={},
            merge_data=lambda states: states[0],
            model=model,
        )

    own = of(folder)
    exported = str(own.folder / "step-1-hf")
    imports = of(folder / "other", initial_load_in_hf=True, initial_load_path=exported)
    return [
        lambda: own.save(1, {"step": 1, "data": {}}),
        lambda: own.load(),
        lambda: own.export(1),
        lambda: imports.load(),
    ]


@contextmanager
def _alone() -> Iterator[None]:
    """A world of this rank."""
    dist.init_process_group("cpu:gloo,cuda:fake", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _sums_on_device() -> Iterator[None]:
    """As with NCCL; whatever the sums of unknown values are, or a router's bias."""
    checksums = module.checksums

    def sums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
        with suppress(RunError):
            checksums(tensors)
        return dict.fromkeys(tensors, "0" * 16)

    with (
        mock.patch.object(dist, "get_backend_config", lambda *_: "cpu:gloo,cuda:nccl"),
        mock.patch.object(module, "checksums", sums),
        mock.patch.object(write_folder, "_refuse_lost_bias", lambda *_: None),
        # Fake tensors stand one thread.
        mock.patch.object(write_folder, "one_ahead", map),
    ):
        yield
