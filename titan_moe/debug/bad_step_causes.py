"""Finds the causes of a bad step: the first place that is not finite, and the sequences with the
largest losses.

The loss of a step is a sum over target tokens, and a normal step never has a part of it by itself.
So a bad step's sequences run forward once more, one at a time and without gradients. That costs
about the time of the step's forward, and a step that updates normally pays nothing.
"""

import math
from collections.abc import Mapping
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_moe.data.batch import IGNORE_INDEX, Batch
from titan_moe.distributed.dtensor import local_part
from titan_moe.distributed.parallelize import ShardedModel
from titan_moe.moe.layer import take_dropped
from titan_moe.train_step import local_batch

_KEPT = 8


class _Found(NamedTuple):
    """The first place of a search on one rank; `order` compares places across ranks."""

    order: tuple[int, int]
    """Index of the first parameter of its part in the whole model, and its place in the part."""
    place: str


@torch.no_grad()
def bad_step_causes(
    sharded: ShardedModel, batches: list[Batch], device: torch.device, *, is_finite: bool
) -> tuple[str, list[dict[str, Any]]]:
    """Runs a bad step's sequences again, while its gradients are still there.

    Collective over all ranks, in every layout; leaves no trace in the model.

    Returns:
        The first place, over all ranks, that is not finite (empty if the step `is_finite`): of the
        parameters, then every module's output, then the gradients. And up to 8 sequences, the
        largest mean loss first, one that is not finite before all others. Each is {"loss": nats per
        target token, "targets": number of them, "documents": source and name of each document}.
        Both are the same on every rank.
    """
    # Taken before the forward, which may leave FSDP's parameters gathered, without gradients.
    parameters = dict(sharded.named_parameters())
    grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    outputs: list[_Found] = []
    hooks = [] if is_finite else _watch_outputs(sharded, outputs)
    rows = [row for batch in batches for row in _rows(batch)]
    sharded.train(False)
    # Compiled layers would not call hooks, and would be compiled again for one row.
    with torch.compiler.set_stance("force_eager"):
        losses = [sharded.execution.evaluate(local_batch(row, sharded, device)) for row in rows]
    sharded.train(True)
    take_dropped(sharded.moe_layers().values(), device)
    for hook in hooks:
        hook.remove()
    place = ""
    if not is_finite:
        place = _first_place(sharded.names, parameters, min(outputs, default=None), grads)
    return place, _worst_sequences(sharded, rows, torch.stack(losses))


def _rows(batch: Batch) -> list[Batch]:
    return [
        Batch(
            batch.tokens_BS[row : row + 1],
            batch.labels_BS[row : row + 1],
            batch.documents_BS[row : row + 1],
            [documents],
        )
        for row, documents in enumerate(batch.samples)
    ]


def _watch_outputs(sharded: ShardedModel, found: list[_Found]) -> list[Any]:
    """Add each module's output that is not finite to `found`; returns the hooks."""
    calls = count()

    def watch(name: str, part: nn.Module) -> object:
        start = sharded.names.index(next(part.named_parameters())[0])

        def hook(module: nn.Module, args: object, output: object) -> None:
            order = (start, next(calls))
            if isinstance(output, Tensor) and not output.isfinite().all():
                found.append(_Found(order, name))

        return hook

    return [
        module.register_forward_hook(watch(name, part))  # type: ignore[arg-type]
        for part in sharded.parts
        for name, module in part.named_modules()
        if name
    ]


def _first_place(
    names: list[str],
    parameters: Mapping[str, Tensor],
    output: _Found | None,
    grads: Mapping[str, Tensor],
) -> str:
    """Names the first place of all ranks. Collective."""
    if first := _earliest(_in_tensors(parameters, names)):
        return f"first seen in the parameter {first[0].place}"
    if first := _earliest(output):
        return f"first seen in the output of {first[0].place} on rank {first[1]}"
    # Backwards: a bad gradient spreads from the loss towards the embedding.
    if first := _earliest(_in_tensors(grads, names[::-1])):
        return f"first seen in the gradient of {first[0].place}"
    return "every tensor is finite by itself: a sum over them overflowed"


def _earliest(found: _Found | None) -> tuple[_Found, int] | None:
    """Returns the first place that any rank has found, and the first rank that has."""
    everyone: list[_Found | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    hits = [(each, rank) for rank, each in enumerate(everyone) if each is not None]
    return min(hits, default=None)


def _in_tensors(tensors: Mapping[str, Tensor], names: list[str]) -> _Found | None:
    """Looks through this rank's tensors in the order of the whole model's names."""
    for order, name in enumerate(names):
        if name in tensors and not local_part(tensors[name]).isfinite().all():
            return _Found((order, 0), name)
    return None


def _worst_sequences(
    sharded: ShardedModel, rows: list[Batch], losses_N: Tensor
) -> list[dict[str, Any]]:
    # Ranks with the same sequences hold shares of their losses: one row of the table sums them.
    dims, rank = sharded.meshes.dims, sharded.meshes.rank
    sums_RN = losses_N.new_zeros(dims.size("batch"), len(rows), dtype=torch.float64)
    sums_RN[dims.coordinate(rank, "batch")] = losses_N
    dist.all_reduce(sums_RN)
    targets = [int((row.labels_BS != IGNORE_INDEX).sum()) for row in rows]
    read = [(number, row.samples[0]) for number, row in zip(targets, rows, strict=True)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (dims.coordinate(rank, "batch"), read))

    sequences = [
        {"loss": total / num_targets, "targets": num_targets, "documents": documents}
        for coordinate, sequences in dict(everyone).items()
        for total, (num_targets, documents) in zip(
            sums_RN[coordinate].tolist(), sequences, strict=True
        )
        if num_targets
    ]
    return sorted(sequences, key=_badness, reverse=True)[:_KEPT]


def _badness(sequence: dict[str, Any]) -> float:
    return sequence["loss"] if math.isfinite(sequence["loss"]) else math.inf
