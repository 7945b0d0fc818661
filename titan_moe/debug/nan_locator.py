"""The first parameter, output or gradient of a bad step that is not finite."""

from collections.abc import Callable, Mapping
from itertools import chain, count
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_moe.data.batch import Batch
from titan_moe.distributed.dtensor import local_part
from titan_moe.distributed.parallelize import ShardedModel
from titan_moe.moe.layer import take_dropped
from titan_moe.train_step import local_batch

_DOCUMENTS_NAMED = 20


class Found(NamedTuple):
    """The first place of a search on one rank; `order` compares places across ranks."""

    order: tuple[int, int]
    """Index of the first parameter of its part in the whole model, and its place in the part."""
    place: str


def describe_nonfinite(sharded: ShardedModel, batches: list[Batch], device: torch.device) -> str:
    """Name the first place, over all ranks, that is not finite, and the documents that were read.

    Looks at the parameters, then at every module's output in a repeated forward pass, then at the
    gradients that the failed step left behind. Collective over all ranks; leaves no trace in the
    model.
    """
    parameters = dict(sharded.named_parameters())
    # Backwards: a bad gradient spreads from the loss towards the embedding.
    grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    samples = [document for batch in batches for row in batch.samples for document in row]
    everyone: list[list] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, samples)

    if found := _earliest(lambda: _in_tensors(parameters, sharded.names)):
        return f"first seen in the parameter {found[0].place}"
    if found := _earliest(lambda: _in_forward(sharded, batches, device)):
        (_, place), rank = found
        read = _named(everyone[rank])
        return f"first seen in the output of {place} on rank {rank}, which read {read}"
    if found := _earliest(lambda: _in_tensors(grads, sharded.names[::-1])):
        documents = list(chain(*everyone))
        return f"first seen in the gradient of {found[0].place}; the step read {_named(documents)}"
    return "every tensor is finite by itself: a sum over them overflowed"


def _earliest(search: Callable[[], Found | None]) -> tuple[Found, int] | None:
    """Returns the first place that any rank finds, and the first rank that finds it."""
    results: list[Found | None] = [None] * dist.get_world_size()
    dist.all_gather_object(results, search())
    hits = [(found, rank) for rank, found in enumerate(results) if found is not None]
    return min(hits, default=None)


def _named(documents: list) -> str:
    shown = ", ".join(str(document) for document in documents[:_DOCUMENTS_NAMED])
    rest = len(documents) - _DOCUMENTS_NAMED
    return f"the documents {shown}" + (f" and {rest} more" if rest > 0 else "")


def _in_tensors(tensors: Mapping[str, Tensor], names: list[str]) -> Found | None:
    """Looks through this rank's tensors in the order of the whole model's names."""
    for order, name in enumerate(names):
        if name in tensors and not local_part(tensors[name]).isfinite().all():
            return Found((order, 0), name)
    return None


@torch.no_grad()
def _in_forward(sharded: ShardedModel, batches: list[Batch], device: torch.device) -> Found | None:
    """Runs every batch to its end, so that all ranks meet in all collectives."""
    places: list[Found] = []
    calls = count()

    def watch(name: str, part: nn.Module) -> object:
        start = sharded.names.index(next(part.named_parameters())[0])

        def hook(module: nn.Module, args: object, output: object) -> None:
            order = (start, next(calls))
            if isinstance(output, Tensor) and not output.isfinite().all():
                places.append(Found(order, name))

        return hook

    hooks = [
        module.register_forward_hook(watch(name, part))  # type: ignore[arg-type]
        for part in sharded.parts
        for name, module in part.named_modules()
        if name
    ]
    sharded.train(False)
    # Compiled layers would not call hooks.
    with torch.compiler.set_stance("force_eager"):
        for batch in batches:
            sharded.execution.evaluate(local_batch(batch, sharded, device))
    sharded.train(True)
    take_dropped(sharded.moe_layers().values(), device)
    for hook in hooks:
        hook.remove()
    return min(places, default=None)
