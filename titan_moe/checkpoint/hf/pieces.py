"""Finds the boxes of Hugging Face tensors that hold a box of one of our tensors, by arithmetic.

A box is a tuple of slices of a whole tensor. That of a Hugging Face tensor may have a step,
where projections take turns.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from titan_moe.distributed.boxes import Box
from titan_moe.models.hf_names import HFWeight, Rows


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
        dim, rows = self._shared()
        shape = list(self.shape)
        shape[dim] = shape[dim] // (rows.last - rows.first) * rows.size
        names = [self.way.name]
        if self.one_by_one:
            names = [self._of_expert(expert) for expert in range(shape.pop(0))]
        if self.way.transposed:
            shape[-2:] = shape[:-3:-1]
        before, after = self.way.ones
        return dict.fromkeys(names, (*[1] * before, *shape, *[1] * after))

    def pieces(self, box: Box) -> Iterator[Piece]:
        """Yields the pieces that cover a box of our tensor, each element once."""
        dim, rows = self._shared()
        before, after = (whole([1] * ones) for ones in self.way.ones)
        for there, here in _stored_rows(box[dim], rows):
            theirs, ours = list(box), list(box)
            theirs[dim], ours[dim] = there, here
            experts = theirs.pop(0) if self.one_by_one else slice(0, 1)
            if self.way.transposed:
                theirs[-2:] = theirs[:-3:-1]
            for expert in range(experts.start, experts.stop):
                if self.one_by_one:
                    ours[0] = slice(expert, expert + 1)
                name, stored = self._of_expert(expert), (*before, *theirs, *after)
                yield Piece(name, stored, tuple(ours), self.way.transposed)

    def _of_expert(self, expert: int) -> str:
        return self.way.name.replace("{expert}", str(expert))

    def _shared(self) -> tuple[int, Rows]:
        """The dim, in our order, whose stored rows projections may share, and which are ours: of a
        bias the last, else the second last."""
        if isinstance(self.way.rows, Rows):
            return -len(self.shape), self.way.rows
        is_bias = len(self.shape) - (".experts." in self.name) == 1
        dim = -1 if is_bias else -2
        size = self.shape[dim]
        rows = {
            "whole": Rows(0, size, size),
            "first half": Rows(0, size, 2 * size),
            "second half": Rows(size, 2 * size, 2 * size),
            "even": Rows(0, 1, 2),
            "odd": Rows(1, 2, 2),
        }
        return dim, rows[self.way.rows]


def _stored_rows(box: slice, rows: Rows) -> Iterator[tuple[slice, slice]]:
    """Yields stored rows and the rows of `box` that they hold, group by group."""
    own = rows.last - rows.first
    if own == 1:  # A slice with steps does for all groups.
        yield slice(rows.size * box.start + rows.first, rows.size * box.stop, rows.size), box
        return
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
