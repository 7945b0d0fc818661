"""Values out of a Hugging Face folder into tensors, box by box; nothing is exchanged."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from titan_moe.checkpoint.hf.folder import HFFolder
from titan_moe.checkpoint.hf.pieces import Box, Stored, cut, lengths, relative
from titan_moe.distributed.dtensor import local_part, local_slices

# Elements handled together. With the file's bytes, a float32 copy of quantised ones and reading
# past what lies between short runs, a process holds some hundred MB beside its shard.
LARGEST = 2**24


@torch.no_grad()
def fill_tensors(
    tensors: Mapping[str, Tensor],
    found: Mapping[str, Stored],
    folder: HFFolder,
    advance: Callable[[int], object] = lambda number: None,
) -> None:
    """Fill this rank's parts of our tensors from a folder; those not in `found` stay.

    Args:
        tensors: plain or DTensors, by our names.
        found: where they are stored (names.find).
        advance: told how many bytes of ours have been filled.
    """
    for name, tensor in tensors.items():
        if name in found:
            part = local_part(tensor.detach())
            fill_box(part, local_slices(tensor), found[name], folder, advance)


def fill_box(
    values: Tensor,
    box: Box,
    stored: Stored,
    folder: HFFolder,
    advance: Callable[[int], object] = lambda number: None,
) -> None:
    """Fill a tensor with the box of a whole tensor of ours, cast to its type."""
    for part in cut(box, LARGEST):
        view = values[relative(part, box)]
        for piece in stored.pieces(part):
            theirs = folder.read(piece.tensor, piece.theirs)
            if piece.transposed:
                theirs = theirs.transpose(-1, -2)
            # An expert's own tensor has a dim less, which copy_ puts in front.
            view[relative(piece.ours, part)].copy_(theirs)
        advance(view.numel() * view.element_size())


def read_box_of(stored: Stored, box: Box, folder: HFFolder, dtype: torch.dtype) -> Tensor:
    """The box of a whole tensor of ours, on the CPU."""
    values = torch.empty(lengths(box), dtype=dtype)
    fill_box(values, box, stored, folder)
    return values
