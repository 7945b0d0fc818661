"""Where a loss or a gradient that is not a number was born."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_moe.data.batch import Batch
from titan_moe.models.decoder import Decoder
from titan_moe.train_step import batch_loss


def describe_nonfinite(model: Decoder, batches: list[Batch]) -> str:
    """Name the first place, over all ranks, that is not finite, and the documents that were read.

    Looks at the parameters, then at every module's output in a repeated forward pass, then at the
    gradients that the failed step left behind. Collective over all ranks; counts no token.
    """
    grads = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    searches: list[Callable[[], str | None]] = [
        lambda: _in_tensors("parameter", model.named_parameters()),
        lambda: _in_forward(model, batches),
        lambda: _in_tensors("gradient of", grads),
    ]
    samples = [row for batch in batches for row in batch.samples]
    for search in searches:
        found: list[tuple[str | None, list]] = [(None, [])] * dist.get_world_size()
        dist.all_gather_object(found, (search(), samples))
        for rank, (place, rows) in enumerate(found):
            if place is not None:
                return f"first seen in the {place} on rank {rank}, which read the documents {rows}"
    return "every tensor is finite by itself: a sum over them overflowed"


def _in_tensors(kind: str, tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    for name, tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not local.isfinite().all():
            return f"{kind} {name}"
    return None


@torch.no_grad()
def _in_forward(model: Decoder, batches: list[Batch]) -> str | None:
    """Runs every batch to its end, so that all ranks meet in all collectives."""
    places: list[str] = []

    def watch(name: str) -> object:
        def hook(module: nn.Module, args: object, output: object) -> None:
            if isinstance(output, Tensor) and not output.isfinite().all():
                places.append(f"output of {name}")

        return hook

    hooks = [
        module.register_forward_hook(watch(name))  # type: ignore[arg-type]
        for name, module in model.named_modules()
        if name
    ]
    device = next(model.buffers()).device
    model.eval()
    for batch in batches:
        batch_loss(model, batch, device)
    model.train()
    for hook in hooks:
        hook.remove()
    return places[0] if places else None
