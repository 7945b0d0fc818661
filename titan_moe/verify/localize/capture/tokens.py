"""The tokens of the global batch that a tensor's rows belong to, in any layout."""

import torch
from torch import Tensor

from titan_moe.verify.localize.capture.records import TOKEN_SUMS, TOKENS, Laid
from titan_moe.verify.localize.capture.sketch import sketch_rows


class Microbatch:
    """The rows of one forward, as this rank reads them.

    Args:
        rows_B: each row's fingerprint.
        positions_S: the positions that this rank reads of each.
        tp, tp_rank: tensor parallelism: outside of attention and feed-forwards a rank holds its
            consecutive part of these positions, inside all of them.
    """

    def __init__(self, rows_B: Tensor, positions_S: Tensor, tp: int, tp_rank: int) -> None:
        self.tp, self.tp_rank = tp, tp_rank
        self.size, self.length = len(rows_B), len(positions_S)
        self.own = self.length // tp
        both = torch.broadcast_tensors(rows_B[:, None], positions_S)
        keys_BSN = torch.stack(both, -1)
        own_BSN = keys_BSN[:, tp_rank * self.own : (tp_rank + 1) * self.own]
        self.keys = keys_BSN.flatten(0, 1)
        self.own_keys = own_BSN.flatten(0, 1)
        by_rank = [part.flatten(0, 1) for part in keys_BSN.split(max(1, self.own), 1)]
        self._flat_keys = torch.cat(by_rank)

    def lay(self, x: Tensor, *, cut: bool, gradient: bool) -> Laid | None:
        """Sketches of a tensor [B, S, ...] or [T, F]; None for one that is not by token.

        Args:
            cut: whether each tp rank has its columns of it, if it has all tokens of it.
            gradient: then of what each tp rank has all columns, it has a part of a sum.
        """
        keys, everyone = self._keys(x)
        if keys is None:
            return None
        x_NF = x.flatten(0, 1) if x.ndim > 2 else x
        x_NF = x_NF.flatten(1)
        if not everyone:
            return Laid(keys, sketch_rows(x_NF), TOKENS)
        if cut:
            first = self.tp_rank * x_NF.shape[1]
            return Laid(keys, sketch_rows(x_NF, first), TOKENS, first)
        if gradient:
            return Laid(keys, sketch_rows(x_NF), TOKEN_SUMS, self.tp_rank)
        return Laid(keys, sketch_rows(x_NF), TOKENS)

    def _keys(self, x: Tensor) -> tuple[Tensor | None, bool]:
        """The tokens of a tensor's rows, and whether they are those of all tp ranks."""
        if x.ndim == 2:
            if len(x) == self.size * self.own:
                return self.own_keys, False
            return (self._flat_keys, True) if len(x) == self.size * self.length else (None, False)
        if x.ndim < 2 or x.shape[0] != self.size:
            return None, False
        if x.shape[1] == self.own:
            return self.own_keys, False
        return (self.keys, True) if x.shape[1] == self.length else (None, False)
