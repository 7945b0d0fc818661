"""Describes how far back a layer's attention sees. Imports no torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LocalAttention:
    """The near past, which alone a layer sees."""

    kind: Literal["window", "chunk"]
    """'window': a token sees the last `size` tokens, itself among them (arXiv 2004.05150);
    'chunk': a sequence, or each document of it where documents are masked, is cut every `size`
    tokens, and a token sees its own piece (Llama 4)."""
    size: int


def mean_seen(local: LocalAttention | None, seq_len: int) -> float:
    """Returns how many tokens of a sequence a token sees on average, itself included."""
    if local is None:
        return (seq_len + 1) / 2
    size = min(local.size, seq_len)
    if local.kind == "window":
        return (size * (size + 1) / 2 + (seq_len - size) * size) / seq_len
    assert local.kind == "chunk", local.kind
    pieces, rest = divmod(seq_len, size)
    return (pieces * size * (size + 1) / 2 + rest * (rest + 1) / 2) / seq_len
