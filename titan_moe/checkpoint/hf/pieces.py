"""Finds the boxes of Hugging Face tensors that hold a box of one of our tensors, by arithmetic.

A box is a tuple of slices of a whole tensor. That of a Hugging Face tensor may have a step of 2,
where gate and up projections take turns.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from titan_moe.distributed.boxes import Box
from titan_moe.models.hf_family import HFWeight, Rows

_STEP = {"even": (0, 2), "odd": (1, 2)}


class Piece(NamedTuple):
    """A box of our tensor that lies in one Hugging Face tensor."""

    tensor: str
    theirs: Box
    ours: Box
    transposed: bool
    """The stored tensors have the last two dims of ours swapped."""


class Stored(NamedTuple):
    """One of our tensors, and the way in which it is stored."""

    name: str
    shape: tuple[int, ...]
    way: HFWeight
    """The form in which it is stored; its name has the layer's number filled in."""

    @property
    def one_by_one(self) -> bool:
        """Tells whether each expert is stored in a tensor of its own."""
        return "{expert}" in self.way.name

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Returns names and shapes of the Hugging Face tensors that hold it."""
        shape = list(self.shape[1:] if self.one_by_one else self.shape)
        if isinstance(rows := self.way.rows, Rows):
            shape[0] = shape[0] // (rows.last - rows.first) * rows.size
        elif rows != "whole":
            shape[self._shared_dim(len(shape))] *= 2
        if self.way.transposed:
            shape[-2:] = shape[:-3:-1]
        before, after = self.way.ones
        shape = [1] * before + shape + [1] * after
        names = [self.way.name]
        if self.one_by_one:
            names = [self._of_expert(expert) for expert in range(self.shape[0])]
        return dict.fromkeys(names, tuple(shape))

    def pieces(self, box: Box) -> Iterator[Piece]:
        """Yields the pieces that cover a box of our tensor, each element once."""
        if isinstance(self.way.rows, Rows):
            for there, here in _grouped_rows(box[0], self.way.rows):
                yield Piece(self.way.name, (there, *box[1:]), (here, *box[1:]), transposed=False)
            return
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
        if (rows := self.way.rows) != "whole":
            assert isinstance(rows, str)
            dim = self._shared_dim(len(box))
            size = self.shape[dim - len(box)]
            theirs[dim] = _shared_rows(box[dim], rows, size)
        if self.way.transposed:
            theirs[-2:] = theirs[:-3:-1]
        before, after = (whole([1] * ones) for ones in self.way.ones)
        return *before, *theirs, *after


def _shared_rows(box: slice, rows: str, size: int) -> slice:
    if rows in _STEP:
        first, step = _STEP[rows]
        return slice(step * box.start + first, step * box.stop, step)
    shift = size if rows == "second half" else 0
    return slice(box.start + shift, box.stop + shift)


def _grouped_rows(box: slice, rows: Rows) -> Iterator[tuple[slice, slice]]:
    """Yields stored rows and the rows of `box` that they hold, group by group."""
    own = rows.last - rows.first
    for group in range(box.start // own, -(-box.stop // own)):
        begin, end = max(box.start, group * own), min(box.stop, (group + 1) * own)
        shift = group * (rows.size - own) + rows.first
        yield slice(begin + shift, end + shift), slice(begin, end)


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor."""
    return tuple(slice(0, size) for size in shape)


def cut(shape: Sequence[int], largest: int) -> Iterator[Box]:
    """Yields ranges of rows of at most `largest` elements that make up a tensor, in order; a single
    row is not cut."""
    if not shape:
        yield ()
        return
    rows = max(1, largest // prod(shape[1:]))
    for start in range(0, shape[0], rows):
        yield (slice(start, min(start + rows, shape[0])), *whole(shape[1:]))
