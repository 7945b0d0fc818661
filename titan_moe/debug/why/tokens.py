"""The targets of a step with the largest losses, as text."""

import math

from torch import Tensor

from titan_moe.data.batch import IGNORE_INDEX, Batch
from titan_moe.data.tokenizer import Tokenizer
from titan_moe.debug.why.findings import Token

_CONTEXT = 12
"""Tokens of the text before a target that are shown."""


class WorstTokens:
    """Keeps the worst `most` of all targets that it is shown."""

    def __init__(self, tokenizer: Tokenizer, most: int) -> None:
        self._tokenizer, self._most = tokenizer, most
        self._found: list[tuple[float, int, int, Batch]] = []

    def add(self, number: int, row: Batch, losses_S: Tensor) -> None:
        """Of one sequence, by its number in the global batch."""
        ordered_S = losses_S.nan_to_num(nan=math.inf)
        ordered_S = ordered_S.masked_fill(row.labels_BS[0] == IGNORE_INDEX, -math.inf)
        values, places = ordered_S.topk(min(self._most, len(ordered_S)))
        for value, place in zip(values.tolist(), places.tolist(), strict=True):
            if value > -math.inf:
                self._found.append((value, number, place, row))
        self._found.sort(key=lambda each: (-each[0], *each[1:3]))
        del self._found[self._most :]

    def worst(self) -> list[Token]:
        """In the order of their losses."""
        return [self._token(*each) for each in self._found]

    def _token(self, loss: float, number: int, place: int, row: Batch) -> Token:
        document = int(row.documents_BS[0, place])
        own_S = row.tokens_BS[0, max(0, place + 1 - _CONTEXT) : place + 1]
        return Token(
            row=number,
            position=place,
            name=row.samples[0][document],
            before=self._text(own_S.tolist()),
            text=self._text([int(row.labels_BS[0, place])]),
            loss=loss,
        )

    def _text(self, ids: list[int]) -> str:
        known = [token for token in ids if 0 <= token < self._tokenizer.vocab_size]
        return self._tokenizer.decode(known)
