"""Routing traces: `debug.routing_record` keeps every choice of experts that training makes, and
`debug.routing_replay` makes those of a record again, in whatever layout.

A replay goes to the recorded experts; their weights are the router's own scores of them, computed
live, so that gradients reach the router as ever. Counts, balance losses and dispatch follow. What
the router would have chosen otherwise is counted: routing_flips.jsonl has, for every step and
layer, how many of the `slots` (tokens x top_k) went to an expert that was not among its own.

Training only: validation routes live, and is not recorded.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.data.batch import Batch, fingerprints
from titan_moe.distributed.agreement import on_rank_zero
from titan_moe.distributed.collectives import gather_parts
from titan_moe.distributed.parallelize import ShardedModel
from titan_moe.metrics.jsonl import JsonLines
from titan_moe.moe.layer import MoE
from titan_moe.routing.record import (
    Dims,
    Record,
    RecordWriter,
    Routing,
    Tokens,
    name_rows,
    start_record,
)
from titan_moe.runtime.process import Process

FLIPS_FILE = "routing_flips.jsonl"

RoutingFn = Callable[[Tensor], Tensor]
"""scores_TE -> experts_TK: `MoE.routing_fn`."""


class RoutingTrace:
    """What a run keeps of its routings, and which it follows.

    Args:
        resume_step: the last step that the run has behind it.

    Raises ConfigError where a record cannot be written, or cannot be followed to the last step.
    """

    def __init__(
        self, job: JobConfig, sharded: ShardedModel, process: Process, *, resume_step: int
    ) -> None:
        self._sharded = sharded
        self._device = process.device
        self._tracers: list[_Tracer] = []
        # First the replay: a record of a run that replays holds what it did.
        if job.debug.routing_replay is not None:
            self._tracers.append(_Replay(job, sharded, process, resume_step=resume_step))
        if job.debug.routing_record is not None:
            self._tracers.append(_Recording(job, sharded, process, resume_step=resume_step))

    @contextmanager
    def step(self, step: int, batches: Sequence[Batch]) -> Iterator[None]:
        """Around the training of one step on these batches. Collective."""
        tokens = self._tokens(batches)
        for tracer in self._tracers:
            tracer.begin(step, tokens)
        yield
        for tracer in self._tracers:
            tracer.end(step, tokens)

    def close(self) -> None:
        for tracer in self._tracers:
            tracer.close()

    def _tokens(self, batches: Sequence[Batch]) -> Tokens:
        """What this rank routes in a step, in order: microbatches run forward one after the other
        in every schedule of a pipeline."""
        meshes = self._sharded.meshes
        dims, rank = meshes.dims, meshes.rank
        own = torch.tensor([crc for batch in batches for crc in fingerprints(batch)])
        world = dist.group.WORLD
        assert world is not None
        everyone = gather_parts(own.to(self._device), world)
        # Of the ranks that read the same rows, the first.
        before = everyone[:: dims.stride("batch")][: dims.coordinate(rank, "batch")]
        positions = self._sharded.positions(batches[0].tokens_BS.shape[1])
        part = positions.chunk(dims.tp)[dims.coordinate(rank, "tp")]
        return Tokens(name_rows(own.tolist(), before.flatten().tolist()), part.numpy())


def open_trace(
    job: JobConfig, sharded: ShardedModel, process: Process, *, resume_step: int
) -> RoutingTrace | None:
    """The trace that a job asks for, if it asks for one. Raises as RoutingTrace does."""
    if job.debug.routing_record is None and job.debug.routing_replay is None:
        return None
    return RoutingTrace(job, sharded, process, resume_step=resume_step)


class _Tracer(Protocol):
    def begin(self, step: int, tokens: Tokens) -> None: ...
    def end(self, step: int, tokens: Tokens) -> None: ...
    def close(self) -> None: ...


class _Recording:
    """Writes what this rank's MoE layers choose. No host sync before the step has ended."""

    def __init__(
        self, job: JobConfig, sharded: ShardedModel, process: Process, *, resume_step: int
    ) -> None:
        folder = Path(job.debug.routing_record or "")
        dims = record_dims(sharded)
        on_rank_zero(
            lambda: start_record(folder, dims, after=resume_step), doing=f"starting {folder}"
        )
        self._writer = RecordWriter(
            folder,
            rank=process.rank,
            world_size=process.world_size,
            limit_gb=job.debug.routing_record_gb,
            agree=self._all_agree,
        )
        self._device = process.device
        self._taken: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for name, moe in _named(sharded).items():
            self._taken[name] = []
            moe.routing_fn = _kept(moe, self._taken[name])

    def begin(self, step: int, tokens: Tokens) -> None:
        for taken in self._taken.values():
            taken.clear()

    def end(self, step: int, tokens: Tokens) -> None:
        if self._writer.full:
            return
        shape = len(tokens.rows), len(tokens.positions), -1
        layers = {}
        for name, taken in self._taken.items():
            experts_TK, weights_TK = (
                torch.cat(parts).cpu().numpy() for parts in zip(*taken, strict=True)
            )
            layers[name] = Routing(
                experts_TK.view(np.uint16).reshape(shape), weights_TK.reshape(shape)
            )
        self._writer.write(step, tokens, layers)

    def close(self) -> None:
        pass

    def _all_agree(self, agrees: bool) -> bool:
        against = torch.tensor(not agrees, dtype=torch.int64, device=self._device)
        dist.all_reduce(against)
        return against.item() == 0


def _kept(moe: MoE, taken: list[tuple[Tensor, Tensor]]) -> RoutingFn:
    select = moe.routing_fn

    def kept(scores_TE: Tensor) -> Tensor:
        experts_TK = select(scores_TE)
        if moe.training:
            weights_TK = moe.router.gating_weights(scores_TE.detach(), experts_TK)
            # 16 bits: as int64, a step's choices would take more memory than their weights.
            taken.append((experts_TK.to(torch.int16), weights_TK.float()))
        return experts_TK

    return kept


class _Replay:
    """Lets this rank's MoE layers choose what a record says."""

    def __init__(
        self, job: JobConfig, sharded: ShardedModel, process: Process, *, resume_step: int
    ) -> None:
        self._record = Record(Path(job.debug.routing_replay or ""))
        dims = record_dims(sharded)
        self._record.check(dims, key="debug.routing_replay")
        _check_steps(self._record, range(resume_step + 1, job.training.steps + 1))
        self._device = process.device
        self._all_layers = dims.layers
        self._layers = {name: _Follower(moe) for name, moe in _named(sharded).items()}
        self._slots = job.training.global_batch_size * job.training.seq_len * dims.top_k
        self._flips: JsonLines | None = None
        if process.is_main:
            path = Path(job.job.dump_folder) / FLIPS_FILE
            self._flips = JsonLines(path, resume_step=resume_step)

    def begin(self, step: int, tokens: Tokens) -> None:
        recorded = self._record.step(step)
        for name, follower in self._layers.items():
            experts_TK = recorded.experts(name, tokens).reshape(-1, self._record.dims.top_k)
            ahead_TK = torch.from_numpy(experts_TK.astype(np.int64))
            follower.ahead_TK = ahead_TK.to(self._device, non_blocking=True)

    def end(self, step: int, tokens: Tokens) -> None:
        flips_L = torch.zeros(len(self._all_layers), dtype=torch.int64, device=self._device)
        for place, name in enumerate(self._all_layers):
            if name in self._layers:
                flips_L[place] = self._layers[name].take_flips()
        dist.all_reduce(flips_L)
        if self._flips is not None:
            flips = dict(zip(self._all_layers, flips_L.tolist(), strict=True))
            self._flips.write(step, {"slots": self._slots, "flips": flips})

    def close(self) -> None:
        if self._flips is not None:
            self._flips.close()


class _Follower:
    """Chooses for one MoE layer what is `ahead`, and counts its own choices that differ."""

    def __init__(self, moe: MoE) -> None:
        self._moe, self._select = moe, moe.routing_fn
        self._flips: list[Tensor] = []
        self.ahead_TK = torch.empty(0)
        moe.routing_fn = self

    def __call__(self, scores_TE: Tensor) -> Tensor:
        own_TK = self._select(scores_TE)
        if not self._moe.training:
            return own_TK
        num_tokens = len(own_TK)
        taken_TK, self.ahead_TK = self.ahead_TK[:num_tokens], self.ahead_TK[num_tokens:]
        self._flips.append((own_TK[:, :, None] != taken_TK[:, None]).all(-1).sum())
        return taken_TK

    def take_flips(self) -> Tensor:
        """Those of the step that ends."""
        assert not len(self.ahead_TK), "tokens that were not routed"
        flips, self._flips = torch.stack(self._flips).sum(), []
        return flips


def record_dims(sharded: ShardedModel) -> Dims:
    """What a record of this model says of it."""
    moe = sharded.config.moe
    assert moe is not None, "the configuration's own checks let this through"
    layers = [_short(name) for name in sharded.all_moe_layers()]
    return Dims(layers, moe.num_experts, moe.top_k)


def _named(sharded: ShardedModel) -> dict[str, MoE]:
    return {_short(name): moe for name, moe in sharded.moe_layers().items()}


def _short(name: str) -> str:
    """The name that metrics give a layer."""
    return name.removesuffix(".block")


def _check_steps(record: Record, needed: range) -> None:
    known = set(record.steps)
    missing = next((step for step in needed if step not in known), None)
    if missing is not None:
        raise ConfigError(
            [
                f"debug.routing_replay={record.folder} lacks step {missing} of training.steps="
                f"{needed[-1]}, or a rank's part of it: train fewer steps, or record more "
                f"(debug.routing_record_gb)"
            ]
        )
