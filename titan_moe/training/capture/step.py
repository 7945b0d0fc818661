"""The capture of one step: a summary of every tensor of it, by which runs are compared.

Everything is kept in the coordinates of the whole model and the whole batch: tokens by sequence
and position, experts and parameters by their names, and of each tensor a sketch that adds up over
its shards. So captures of any two layouts can be put side by side, and their size is bounded: per
token and tensor 8 numbers. verify/localize/capture_reader.py reads them.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from titan_moe.data.batch import Batch, fingerprints
from titan_moe.distributed.dtensor import local_part, local_slices
from titan_moe.distributed.execution import LocalBatch
from titan_moe.models.decoder import Decoder
from titan_moe.parallelize.parallelize import ShardedModel
from titan_moe.training.capture.hooks import watch
from titan_moe.training.capture.records import (
    EXPERTS,
    NUMBERS,
    TENSOR,
    TOKENS,
    Place,
    Records,
    Sketches,
    token_keys,
)
from titan_moe.training.capture.sketch import sketch_box, sketch_experts, sketch_rows
from titan_moe.training.capture.watcher import Microbatch, Watcher
from titan_moe.training.train_step import Observer, StepResult

FOLDER = "capture"
_SUMS = {
    "num_targets": "loss",
    "loss": "loss",
    "mtp_loss": "loss",
    "indexer_loss": "loss",
    "balance_loss": "loss",
    "grad_norm": "norm",
}
"""Phases of a step's sums."""


class StepCapture(Observer):
    """Watches a step from its start to its update, then writes this rank's file."""

    def __init__(self, sharded: ShardedModel, optimizer: Optimizer, step: int) -> None:
        self._sharded, self._optimizer, self._step = sharded, optimizer, step
        self._records = Records()
        self._sequences: list[int] = []
        dims, rank = sharded.meshes.dims, sharded.meshes.rank
        self._rank, self._layers = rank, sharded.all_moe_layers()
        self._tp, self._tp_rank = dims.size("tp"), dims.coordinate(rank, "tp")
        self._stages = [_stage(part, sharded.plan.stages) for part in sharded.parts]
        self._parameters("start", "parameter", lambda parameter: parameter)
        self._routers("start")
        self._hooks = []
        for part, stage in zip(sharded.parts, self._stages, strict=True):
            watcher = Watcher(self._records, stage, self._tokens_of, interleaved=dims.pp > 1)
            self._hooks += watch(sharded, part, watcher)

    def reads(self, batch: Batch, local: LocalBatch) -> None:
        """Records what this rank reads of a batch; before its forward."""
        positions_S = self._sharded.positions(batch.tokens_BS.shape[1])
        names_B = torch.tensor(fingerprints(batch), dtype=torch.int64)
        self._now = local, names_B, positions_S
        self._sequences += [name for name in names_B.tolist() if name not in self._sequences]
        read = {
            "tokens": local.tokens_BS,
            "labels": local.labels_BS,
            "positions": local.positions_BS,
        }
        if local.ahead_tokens_BKS is not None and local.ahead_labels_BKS is not None:
            for depth in range(local.ahead_tokens_BKS.shape[1]):
                read[f"tokens {depth + 1} ahead"] = local.ahead_tokens_BKS[:, depth]
                read[f"labels {depth + 1} ahead"] = local.ahead_labels_BKS[:, depth]
        read["documents"] = local.documents_BS
        for name, x_BS in read.items():
            # Every rank has the documents of all positions.
            read_S = torch.arange(x_BS.shape[1]) if name == "documents" else positions_S
            keys_T = token_keys(names_B, read_S).flatten()
            sketches = Sketches(TOKENS, keys_T, sketch_rows(x_BS.reshape(-1, 1).double()))
            self._records.add(Place("data", "batch", name), 0, sketches)

    def accumulated(self) -> None:
        """Records gradients after all sums over ranks, before clipping."""
        for hook in self._hooks:
            hook.remove()
        self._parameters("gradient", "gradient", lambda parameter: parameter.grad)
        for name, moe in self._sharded.moe_layers().items():
            # Every rank has the loss of its own tokens.
            place, losses = Place("loss", f"{name}.moe", "balance loss"), [moe.router.balance_loss]
            self._numbers(place, losses, self._layers.index(name), NUMBERS, self._rank)

    def updated(self, result: StepResult) -> None:
        """Records the step's sums and what it leaves; after the update, or where there is none."""
        logged = (result.metrics or {}) | vars(result)
        for name, phase in _SUMS.items():
            if (value := logged.get(name)) is not None:
                # Routers count their balance losses in the backward: after the other losses, and
                # before their sum.
                stage = len(self._layers) if name == "balance_loss" else -1
                self._numbers(Place(phase, "", name), [value], stage, NUMBERS)
        if result.counts_LE is not None:
            for name, counts_E in zip(self._layers, result.counts_LE, strict=True):
                place = Place("counts", f"{name}.moe.router", "tokens_per_expert")
                self._numbers(place, counts_E, 0, EXPERTS)
        self._routers("balance")
        state = self._optimizer.state
        # A parameter without one of the moments is recorded with zeros.
        for which in sorted({key for each in state.values() for key in each} - {"step"}):
            self._parameters("moments", which, lambda p, key=which: state[p].get(key))  # type: ignore[misc]
        self._parameters("parameters", "parameter", lambda parameter: parameter)

    def write(self, folder: Path) -> None:
        """Writes this rank's file."""
        dims = self._sharded.meshes.dims
        facts: dict[str, Any] = {
            "step": self._step,
            "rank": self._rank,
            "world_size": dims.world_size,
            "layout": dims.sizes,
            "compute_dtype": self._sharded.plan.types.compute,
            "rows": self._sequences,  # Captures of other revisions are read by this name.
        }
        self._records.save(folder / FOLDER / f"rank-{self._rank:05d}.pt", facts)

    def _tokens_of(self, documents_BS: Tensor) -> Microbatch:
        """A pipeline's microbatch is a view of the documents that its rank was given."""
        local, names_B, positions_S = self._now
        whole_BS = local.documents_BS
        distance = documents_BS.data_ptr() - whole_BS.data_ptr()
        first = distance // (whole_BS.stride(0) * whole_BS.element_size())
        last = first + len(documents_BS)
        assert first >= 0 and last <= len(whole_BS), "the microbatch's documents are a copy"
        return Microbatch(names_B[first:last], positions_S, self._tp, self._tp_rank)

    def _numbers(self, place: Place, numbers: Any, stage: int, kind: str, summand: int = 0) -> None:
        """Records numbers of the whole step, or one for each expert."""
        values = torch.as_tensor(numbers, dtype=torch.float64).detach().cpu()[:, None]
        self._records.add(place, stage, Sketches(kind, torch.arange(len(values)), values, summand))

    def _routers(self, phase: str) -> None:
        for name, moe in self._sharded.moe_layers().items():
            for which in ("expert_bias", "previous_load"):
                place = Place(phase, f"{name}.moe.router", which)
                self._numbers(place, getattr(moe.router, which), self._layers.index(name), EXPERTS)

    @torch.no_grad()
    def _parameters(self, phase: str, tensor: str, choose: Any) -> None:
        """A sketch of every parameter, or of what belongs to it; nothing counts as zeros."""
        for part, stage in zip(self._sharded.parts, self._stages, strict=True):
            for name, parameter in part.named_parameters():
                box, chosen = local_slices(parameter), choose(parameter)
                if chosen is None:
                    chosen = torch.zeros_like(parameter)
                held = local_part(chosen)
                module, _, last = name.rpartition(".")
                place = Place(phase, module, last if phase == "start" else f"{tensor} of {last}")
                if ".experts." in name:
                    values = sketch_experts(held, box)
                    keys = torch.arange(box[0].start, box[0].start + len(values))
                    sketches = Sketches(EXPERTS, keys, values, _number_of(box[1:]))
                else:
                    values = sketch_box(held, box)[None]
                    sketches = Sketches(TENSOR, torch.zeros(1).long(), values, _number_of(box))
                self._records.add(place, stage, sketches)


def _number_of(box: tuple[slice, ...]) -> int:
    """Returns a number for the shard of a tensor at `box`, the same on every rank."""
    return hash(tuple(span.start for span in box))


def _stage(part: Decoder, stages: list[list[str]]) -> int:
    """Returns the number of the pipeline stage that holds these layers."""
    own = {name.split(".")[0] for name, _ in part.named_parameters()}
    own |= {f"layers.{number}" for number in part.layers}
    return next(index for index, names in enumerate(stages) if set(names) <= own)
