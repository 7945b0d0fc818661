"""Which boxes of which Hugging Face tensors hold a box of one of ours. Arithmetic; no torch.

A box is a tuple of slices of a whole tensor; theirs may have a step of 2, where gate and up
projections take turns.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from titan_moe.models.hf_family import HFWeight

Box = tuple[slice, ...]

_STEP = {"even": (0, 2), "odd": (1, 2)}


class Piece(NamedTuple):
    """A box of ours that one of their tensors holds."""

    tensor: str
    theirs: Box
    ours: Box
    transposed: bool
    """Their last two dims are ours swapped."""


class Stored(NamedTuple):
    """One tensor of ours, and the way in which it is stored."""

    name: str
    shape: tuple[int, ...]
    way: HFWeight
    """With the layer's number filled in."""

    @property
    def one_by_one(self) -> bool:
        """Each expert has a tensor of its own."""
        return "{expert}" in self.way.name

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors of theirs that hold it."""
        shape = list(self.shape[1:] if self.one_by_one else self.shape)
        if self.way.part != "whole":
            shape[self._shared_dim(len(shape))] *= 2
        if self.way.transposed:
            shape[-2:] = shape[:-3:-1]
        names = [self.way.name]
        if self.one_by_one:
            names = [self._of_expert(expert) for expert in range(self.shape[0])]
        return dict.fromkeys(names, tuple(shape))

    def pieces(self, box: Box) -> Iterator[Piece]:
        """Where a box of ours is; the pieces cover it, each element once."""
        if not self.one_by_one:
            yield Piece(self.way.name, self._theirs(box), box, self.way.transposed)
            return
        experts, *inner = box
        for expert in range(experts.start, experts.stop):
            ours = (slice(expert, expert + 1), *inner)
            theirs = self._theirs(tuple(inner))
            yield Piece(self._of_expert(expert), theirs, ours, self.way.transposed)

    def _of_expert(self, expert: int) -> str:
        return self.way.name.replace("{expert}", str(expert))

    def _shared_dim(self, ndim: int) -> int:
        """The dim, in our order, whose rows gate and up share: of a bias its last, else the second
        last. A bias of stacked experts has two dims, as a matrix has."""
        stacked = ".experts." in self.name and not self.one_by_one
        return ndim - 1 if ndim - stacked == 1 else ndim - 2

    def _theirs(self, box: Box) -> Box:
        theirs = list(box)
        if self.way.part != "whole":
            dim = self._shared_dim(len(box))
            size = self.shape[dim - len(box)]
            theirs[dim] = _shared_rows(box[dim], self.way.part, size)
        if self.way.transposed:
            theirs[-2:] = theirs[:-3:-1]
        return tuple(theirs)


def _shared_rows(rows: slice, part: str, size: int) -> slice:
    if part in _STEP:
        first, step = _STEP[part]
        return slice(step * rows.start + first, step * rows.stop, step)
    shift = size if part == "second half" else 0
    return slice(rows.start + shift, rows.stop + shift)


def lengths(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(len(range(part.start, part.stop, part.step or 1)) for part in box)


def key(box: Box) -> tuple[tuple[int, int], ...]:
    """A box without steps as something to find it by: slices have no hash before Python 3.12."""
    return tuple((part.start, part.stop) for part in box)


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor."""
    return tuple(slice(0, size) for size in shape)


def cut(box: Box, largest: int) -> Iterator[Box]:
    """Boxes (without steps) of at most `largest` elements that make up `box`, in order; a single
    row of the last dim is not cut."""
    sizes = lengths(box)
    if prod(sizes) <= largest or not sizes:
        if prod(sizes):
            yield box
        return
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), 0)
    if dim == len(sizes) - 1 and dim > 0:
        yield box
        return
    rows = max(1, largest // prod(sizes[dim + 1 :]))
    for start in range(box[dim].start, box[dim].stop, rows):
        part = slice(start, min(start + rows, box[dim].stop))
        yield from cut((*box[:dim], part, *box[dim + 1 :]), largest)


def relative(box: Box, origin: Box) -> Box:
    """A box in the coordinates of another that holds it."""
    return tuple(
        slice(part.start - first.start, part.stop - first.start)
        for part, first in zip(box, origin, strict=True)
    )


class Run(NamedTuple):
    """Bytes that lie together in a row-major tensor, and where they are in the box."""

    offset: int
    """Elements from the tensor's start."""
    box_offset: int
    """Elements from the start of the box's own row-major order."""
    length: int
    """Elements."""


def runs(shape: Sequence[int], box: Box) -> Iterator[Run]:
    """The box of a row-major tensor as its longest contiguous runs, in order."""
    sizes = lengths(box)
    if not prod(sizes):
        return
    # Trailing dims that are taken whole, and one more that need not be, make up a run.
    dim, length = len(shape), 1
    while dim > 0 and (box[dim - 1].step or 1) == 1:
        dim -= 1
        length *= sizes[dim]
        if sizes[dim] != shape[dim]:
            break
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    start = sum(box[axis].start * strides[axis] for axis in range(dim, len(shape)))

    def outer(axis: int, offset: int) -> Iterator[int]:
        if axis == dim:
            yield offset
            return
        for row in range(box[axis].start, box[axis].stop, box[axis].step or 1):
            yield from outer(axis + 1, offset + row * strides[axis])

    for number, offset in enumerate(outer(0, start)):
        yield Run(offset, number * length, length)
