"""Finds the causes of a bad step: the first place that is not finite, and the sequences with the
largest losses.

The loss of a step is a sum over target tokens, and a normal step never has a part of it by itself.
So a bad step's sequences run forward once more, one at a time and without gradients. That costs
about the time of the step's forward, and a step that updates normally pays nothing.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_moe.data.batch import IGNORE_INDEX, Batch
from titan_moe.distributed.agreement import from_every_rank
from titan_moe.distributed.dtensor import local_part
from titan_moe.moe.experts import ExpertOutputs
from titan_moe.moe.layer import take_dropped
from titan_moe.parallelize.parallelize import ShardedModel
from titan_moe.training.train_step import local_batch

_DOING = "cannot explain a bad step"
_KEPT = 8
_KINDS = ("parameter", "output of", "gradient of")
_PARAMETER, _OUTPUT, _GRADIENT = range(3)


class _Found(NamedTuple):
    """A place that is not finite. The smallest one of all ranks comes first."""

    kind: int
    order: tuple[int, int]
    """Index of the first parameter of its part in the whole model, and its place in the part."""
    place: str


@torch.no_grad()
def bad_step_causes(
    sharded: ShardedModel, batches: list[Batch], *, is_finite: bool
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
    sequences = [
        Batch(*(field[number : number + 1] for field in vars(batch).values()))
        for batch in batches
        for number in range(len(batch.samples))
    ]
    sharded.train(False)
    # Compiled layers would not call hooks, and would be compiled again for one sequence.
    with torch.compiler.set_stance("force_eager"):
        losses = [sharded.execution.evaluate(local_batch(one, sharded)) for one in sequences]
    sharded.train(True)
    take_dropped(sharded.moe_layers().values(), sharded.device)
    for hook in hooks:
        hook.remove()
    place = ""
    if not is_finite:
        in_parameters = _in_tensors(_PARAMETER, parameters, sharded.names)
        # Backwards: a bad gradient spreads from the loss towards the embedding.
        in_grads = _in_tensors(_GRADIENT, grads, sharded.names[::-1])
        place = _first_place(chain(in_parameters, sorted(outputs), in_grads))
    return place, _worst_sequences(sharded, sequences, torch.stack(losses))


def _watch_outputs(sharded: ShardedModel, found: list[_Found]) -> list[Any]:
    """Add each module's output that is not finite to `found`; returns the hooks."""
    calls = count()

    def look(name: str, start: int, module: nn.Module, args: Any, output: Any) -> None:
        order = (start, next(calls))
        if isinstance(module, ExpertOutputs):  # Rows past the last expert's have no meaning.
            output = output[: args[0].offsets_E[-1]]
        if isinstance(output, Tensor) and not output.isfinite().all():
            found.append(_Found(_OUTPUT, order, name.removesuffix(".compute")))

    hooks = []
    for part in sharded.parts:
        start = sharded.names.index(next(part.named_parameters())[0])
        for name, module in part.named_modules():
            if name:
                hooks.append(module.register_forward_hook(partial(look, name, start)))
    return hooks


def _in_tensors(kind: int, tensors: Mapping[str, Tensor], names: list[str]) -> Iterator[_Found]:
    """Yields this rank's tensors that are not finite, in the order of the whole model's names."""
    for order, name in enumerate(names):
        if name in tensors and not local_part(tensors[name]).isfinite().all():
            yield _Found(kind, (order, 0), name)


def _first_place(own: Iterable[_Found]) -> str:
    """Returns the earliest tensor that is not finite over all ranks, given this rank's in order.
    Collective."""
    everyone = from_every_rank(lambda: next(iter(own), None), doing=_DOING)
    hits = [(found, rank) for rank, found in enumerate(everyone) if found is not None]
    if not hits:
        return "every tensor is finite by itself: a sum over them overflowed"
    (kind, _, place), rank = min(hits)
    where = f" on rank {rank}" if kind == _OUTPUT else ""
    return f"first seen in the {_KINDS[kind]} {place}{where}"


def _worst_sequences(
    sharded: ShardedModel, sequences: list[Batch], losses_N: Tensor
) -> list[dict[str, Any]]:
    # Ranks with the same sequences hold shares of their losses: one row of the table sums them.
    dims = sharded.meshes.dims
    own = dims.coordinate(sharded.meshes.rank, "batch")
    sums_RN = losses_N.new_zeros(dims.size("batch"), len(sequences), dtype=torch.float64)
    sums_RN[own] = losses_N
    dist.all_reduce(sums_RN)
    read = [(int((one.labels_BS != IGNORE_INDEX).sum()), one.samples[0]) for one in sequences]
    everyone = from_every_rank(lambda: (own, read), doing=_DOING)

    found = [
        {"loss": total / num_targets, "targets": num_targets, "documents": documents}
        for coordinate, read in dict(everyone).items()
        for total, (num_targets, documents) in zip(sums_RN[coordinate].tolist(), read, strict=True)
        if num_targets
    ]
    return sorted(found, key=_badness, reverse=True)[:_KEPT]


def _badness(sequence: dict[str, Any]) -> float:
    return sequence["loss"] if math.isfinite(sequence["loss"]) else math.inf
