"""Routing traces: `debug.routing_record` keeps every decision that the layers of a training make,
the experts of each token and the keys that an indexer selects for it, and `debug.routing_replay`
repeats those of a record (`routing_record.py`), in any layout. Tokens that a record of an inference
engine does not cover go where the run's own router sends them.

A replay goes to the recorded experts. Their weights are the router's own scores of them, computed
live, so that gradients reach the router as ever; likewise an indexer's loss compares its own scores
of the recorded keys. routing_flips.jsonl counts for each step and layer how many of the `slots`
(tokens x top_k) the run's own router would have sent to other experts, and for how many of the
`queries` (tokens) the run's own indexer would have selected another set of keys. For MoE layers it
also has the number of `replayed` tokens, of flipped `tokens`, those with such a slot, and their
`margins`, the mean and the largest: by how much the router's own choice beats the recorded one,
over the standard deviation of the token's scores of all experts. Validation is neither recorded nor
replayed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.comm.collectives import gather_parts
from titan_moe.comm.process import Process
from titan_moe.config.job_config import JobConfig
from titan_moe.data.batch import Batch, fingerprints
from titan_moe.debug.router_load import Place, RouterLoad
from titan_moe.debug.routing_record import (
    Dims,
    Form,
    Record,
    RecordWriter,
    Tokens,
    form_of_keys,
    name_sequences,
    start_record,
)
from titan_moe.distributed.agreement import on_rank_zero
from titan_moe.metrics.jsonl import JsonLines
from titan_moe.models.config import ModelConfig, moe_layer_names
from titan_moe.models.indexer import Indexer
from titan_moe.moe.router import Router
from titan_moe.parallelize.parallelize import ShardedModel
from titan_moe.runtime.log import log_on_rank_zero

FLIPS_FILE = "routing_flips.jsonl"


class RoutingTrace:
    """Records a run's decisions, replays those of a record, does both, or neither. The record of a
    run that replays holds the decisions that it used. `resume_step`: the last step before this
    start.

    Raises ConfigError where a record cannot be written, or cannot be followed to the last step.
    """

    def __init__(self, sharded: ShardedModel, process: Process, *, resume_step: int) -> None:
        job = sharded.plan.job
        self._sharded, self._device = sharded, process.device
        self._replayed: Record | None = None
        self._writer: RecordWriter | None = None
        self._flips: JsonLines | None = None
        self._replays: dict[str, Replay] = {}
        self._kept: dict[str, Kept] = {}
        replay, record = job.debug.routing_replay, job.debug.routing_record
        self._loads = router_loads(sharded)
        if replay is None and record is None:
            return
        dims = trace_dims(job, sharded.config)
        queries = job.training.global_batch_size * job.training.seq_len
        self._totals = {"slots": queries * dims.top_k, "queries": queries}
        self._experts, self._keys = dims.layers, _indexers(sharded) if dims.index_top_k else []
        if replay is not None:
            self._replayed = Record(Path(replay))
            steps = range(resume_step + 1, job.training.steps + 1)
            self._replayed.check(dims, key="debug.routing_replay", steps=steps)
            if process.is_main:
                path = Path(job.job.dump_folder) / FLIPS_FILE
                self._flips = JsonLines(path, resume_step=resume_step)
        if record is not None:
            folder, limit_gb = Path(record), job.debug.routing_record_gb
            start = partial(start_record, folder, dims, after=resume_step)
            on_rank_zero(start, doing=f"starting {folder}")
            self._writer = RecordWriter(folder, process.rank, process.world_size, limit_gb)
        for name, moe in sharded.moe_layers().items():
            self._trace(_short(name), moe.router, dims.experts, flipped_experts)
        modules = [each for part in sharded.parts for each in part.named_modules()]
        for name, module in modules if self._keys else []:
            if isinstance(module, Indexer):
                form = form_of_keys(job.training.seq_len)
                self._trace(_short(name), module, form, self._flipped_keys)

    def _trace(
        self, name: str, layer: Router | Indexer, form: Form, count_flips: Callable[..., Tensor]
    ) -> None:
        """Lets a layer decide as the record says, and keeps what it decides."""
        if self._replayed is not None:
            folder = self._replayed.folder
            layer.select = self._replays[name] = Replay(layer.select, form, folder, count_flips)
        if self._writer is not None:
            self._kept[name] = Kept(layer.select, form)

    def _own(self, x_BP: Tensor) -> Tensor:
        """Returns this rank's part of the positions, which the ranks of `tp` share out."""
        dims, rank = self._sharded.meshes.dims, self._sharded.meshes.rank
        return x_BP.chunk(dims.tp, 1)[dims.coordinate(rank, "tp")]

    @contextmanager
    def step(self, step: int, batches: Sequence[Batch]) -> Iterator[None]:
        """Wrap the training of one step on these batches. Collective if the run has a trace."""
        for load in self._loads:
            load.step = step
        if self._replayed is None and self._writer is None:
            yield
            return
        whole = self._tokens(batches)
        own_BP = self._own(torch.from_numpy(whole.positions)[None])
        own = whole._replace(positions=own_BP[0].numpy())
        if self._replayed is not None:
            # Indexers select keys for all positions.
            wanted = {
                name: (whole if name in self._keys else own, replay.form)
                for name, replay in self._replays.items()
            }
            for name, numbers_NPW in self._replayed.decisions(step, wanted).items():
                self._replays[name].follow(torch.from_numpy(numbers_NPW).to(self._device))
        yield
        if self._replayed is not None:
            self._count_flips(step)
        if self._writer is not None:
            taken = {name: kept.take(len(own.sequences)) for name, kept in self._kept.items()}
            taken |= {name: self._own(taken[name]) for name in self._keys if name in taken}
            numbers = {name: numbers_NPW.cpu().numpy() for name, numbers_NPW in taken.items()}
            self._writer.write(step, own, numbers)

    def _count_flips(self, step: int) -> None:
        """Write how many decisions of each layer the run itself would make otherwise."""
        names = [*self._experts, *self._keys]
        sums_L4 = torch.zeros(len(names), 4, dtype=torch.float64, device=self._device)
        largest_L = torch.zeros_like(sums_L4[:, 0])
        for name, replay in self._replays.items():
            flips = replay.take_flips()
            sums_L4[names.index(name)] = flips[:4]
            largest_L[names.index(name)] = flips[4]
        dist.all_reduce(sums_L4)
        dist.all_reduce(largest_L, op=dist.ReduceOp.MAX)
        if self._flips is None:
            return
        keys = "replayed", "flips", "tokens", "margins"
        by_layer: dict[str, dict[str, Any]] = {key: {} for key in keys}
        found = zip(names, sums_L4.tolist(), largest_L.tolist(), strict=True)
        for name, (replayed, slots, tokens, margins), largest in found:
            by_layer["flips"][name] = int(slots)
            if name in self._experts:
                by_layer["replayed"][name] = int(replayed)
                by_layer["tokens"][name] = int(tokens)
                by_layer["margins"][name] = [margins / max(tokens, 1), largest]
        self._flips.write(step, {**self._totals, **by_layer})

    def _flipped_keys(self, live: Tensor, ahead: Tensor, scores_BST: Tensor) -> Tensor:
        """Counts this rank's queries whose set of keys was recorded otherwise."""
        flips = self._own((live != ahead).any(-1)).sum().double()
        return F.pad(flips[None], (0, 3))

    def _tokens(self, batches: Sequence[Batch]) -> Tokens:
        """Returns what this rank's attention reads in a step, in order: microbatches run forward
        one after the other in every schedule of a pipeline."""
        dims, rank = self._sharded.meshes.dims, self._sharded.meshes.rank
        own = torch.tensor([crc for batch in batches for crc in fingerprints(batch)])
        world = dist.group.WORLD
        assert world is not None
        everyone = gather_parts(own.to(self._device), world)
        # Ranks that read the same sequences have the same fingerprints: the first one's count.
        before = everyone[list(dims.group_of(0, "batch"))][: dims.coordinate(rank, "batch")]
        positions = self._sharded.positions(batches[0].tokens_BS.shape[1])
        return Tokens(name_sequences(own.tolist(), before.flatten().tolist()), positions.numpy())


def router_loads(sharded: ShardedModel) -> list[RouterLoad]:
    """Lets a workload choose the experts of all layers, if the job names one."""
    job, dims, moe = sharded.plan.job, sharded.meshes.dims, sharded.config.moe
    if (workload := job.debug.router_load) is None or moe is None:
        return []
    source, seed = dims.coordinate(sharded.meshes.rank, "ep"), job.debug.seed
    place = Place(source, dims.ep, moe.num_experts, moe.top_k, seed)
    layers, loads = sharded.all_moe_layers(), []
    for name, layer in sharded.moe_layers().items():
        layer.router.select = load = RouterLoad(workload, place, layers.index(name))
        loads.append(load)
    log_on_rank_zero(f"debug.router_load={workload}: a workload says where tokens go, no router")
    return loads


class Kept:
    """Keeps the decisions that a layer makes in training, on the device, without a host sync."""

    def __init__(self, select: nn.Module, form: Form) -> None:
        self._width, self._taken = form.width, list[Tensor]()
        self._dtype = torch.from_numpy(np.empty(0, form.dtype)).dtype
        select.register_forward_hook(self._keep)

    def _keep(self, select: nn.Module, args: Any, numbers: Tensor) -> None:
        if select.training:
            self._taken.append(numbers.flatten(0, -2).to(self._dtype))

    def take(self, num_sequences: int) -> Tensor:
        """Returns the numbers of the step that ends, [N, P, W]."""
        taken_TW, self._taken = torch.cat(self._taken), []
        return taken_TW.view(num_sequences, -1, self._width)


class Replay(nn.Module):
    """Takes the place of the module that decides in a layer, `own`: in training it returns the
    recorded decisions instead, where there are some, and counts how the layer's own differ.

    Args:
        folder: the record's, for a printed model.
        count_flips: takes the layer's own decisions, the recorded ones, and the arguments of `own`.
            Returns [4]: flips, and of MoE layers flipped tokens, the sum and the largest of their
            margins.
    """

    def __init__(
        self, own: nn.Module, form: Form, folder: Path, count_flips: Callable[..., Tensor]
    ) -> None:
        super().__init__()
        self.own, self.form, self.folder, self._count_flips = own, form, folder, count_flips
        self._flips: list[Tensor] = []

    def extra_repr(self) -> str:
        return f"decisions of {self.folder}"

    def follow(self, numbers_NPW: Tensor) -> None:
        """Takes the decisions of the step that begins, in the order of its microbatches."""
        self._ahead_TW = numbers_NPW.flatten(0, 1)

    def forward(self, scores: Tensor, *others: Tensor) -> Tensor:
        live = self.own(scores, *others)
        if not self.training:
            return live
        num_tokens = live.shape[:-1].numel()
        ahead_TW, self._ahead_TW = self._ahead_TW[:num_tokens], self._ahead_TW[num_tokens:]
        numbers = ahead_TW.view_as(live).to(live.dtype)
        replayed = torch.full((1,), num_tokens, dtype=torch.float64, device=live.device)
        if live.dtype == torch.int64:  # Experts: the bits of keys have no number for that.
            free = numbers == self.form.limit
            numbers = torch.where(free, live, numbers)
            replayed -= free.any(-1).sum()
        flips = self._count_flips(live, numbers, scores, *others)
        self._flips.append(torch.cat([replayed, flips]))
        return numbers

    def take_flips(self) -> Tensor:
        """Returns, for the step that ends, the number of tokens with a recorded decision and the
        sum of what `count_flips` returned, [5] float64; of the largest margins the largest."""
        assert not len(self._ahead_TW), "tokens without a decision"
        found_M5, self._flips = torch.stack(self._flips), []
        return torch.cat([found_M5[:, :4].sum(0), found_M5[:, 4:].amax(0)])


def flipped_experts(
    live: Tensor, ahead: Tensor, scores_TE: Tensor, bias_E: Tensor, *_: object
) -> Tensor:
    """Counts choices of experts that were not recorded, and their tokens, with their margins."""
    scores_TE = scores_TE.detach() + bias_E
    differs_TKK = live[:, :, None] != ahead[:, None]
    flips_TK, passed_over_TK = differs_TKK.all(2), differs_TKK.all(1)
    flipped_T = flips_TK.any(1)
    # The pair furthest apart, of a token with several flips.
    best_T = scores_TE.gather(1, live).masked_fill(~flips_TK, -torch.inf).amax(1)
    worst_T = scores_TE.gather(1, ahead).masked_fill(~passed_over_TK, torch.inf).amin(1)
    spread_T = scores_TE.std(1).clamp_min(torch.finfo(scores_TE.dtype).tiny)
    # A recorded expert of a group that is not chosen may have the higher score.
    margins_T = torch.where(flipped_T, (best_T - worst_T).abs() / spread_T, 0.0)
    found = [flips_TK.sum(), flipped_T.sum(), margins_T.sum(), margins_T.amax()]
    return torch.stack([each.double() for each in found])


def trace_dims(job: JobConfig, config: ModelConfig) -> Dims:
    """Returns the dimensions in a record of this training. Its model has MoE layers."""
    moe, indexer = config.moe, config.indexer
    assert moe is not None, "the configuration's own checks let this through"
    index_top_k = 0 if indexer is None or indexer.warm_up else indexer.top_k
    across = bool(index_top_k) and not job.training.mask_documents
    layers = [_short(name) for name in moe_layer_names(config)]
    return Dims(layers, moe.num_experts, moe.top_k, index_top_k, across)


def _indexers(sharded: ShardedModel) -> list[str]:
    """Returns the names of the whole model's indexers, in order."""
    owners = [name.partition(".indexer.") for name in sharded.names]
    return list(dict.fromkeys(f"{_short(layer)}.indexer" for layer, found, _ in owners if found))


def _short(name: str) -> str:
    """Returns the name that metrics give a layer."""
    return name.replace(".block", "")
