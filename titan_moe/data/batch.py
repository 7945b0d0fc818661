"""What the loader hands to the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

from titan_moe.data.packing import IGNORE_INDEX, PackedSequence

if TYPE_CHECKING:
    import torch

__all__ = ["IGNORE_INDEX", "Batch", "stack_sequences"]


@dataclass(frozen=True)
class Batch:
    """One microbatch of one data rank, as CPU tensors.

    tokens_BS: int64, the input.
    labels_BS: int64, the next token at each position; IGNORE_INDEX where there is no target.
    documents_BS: int32, each token's document within its row (0, 1, 2, ...), for masks.
    samples: for each row the identifiers of the documents it holds, for error reports.
    """

    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor
    documents_BS: torch.Tensor
    samples: list[list[str]]


def fingerprints(batch: Batch) -> list[int]:
    """CRC32 of each row's tokens, labels and documents: what a row is known by in any layout."""
    rows = zip(batch.tokens_BS, batch.labels_BS, batch.documents_BS, strict=True)
    return [reduce(lambda crc, x_S: crc32(x_S.numpy(), crc), row, 0) for row in rows]


def stack_sequences(rows: Sequence[PackedSequence]) -> Batch:
    """Stack the rows of one microbatch into tensors."""
    import torch  # Here, so that the checks before a run need not wait for torch.

    return Batch(
        tokens_BS=torch.from_numpy(np.stack([row.tokens_S for row in rows])),
        labels_BS=torch.from_numpy(np.stack([row.labels_S for row in rows])),
        documents_BS=torch.from_numpy(np.stack([row.documents_S for row in rows])),
        samples=[row.samples for row in rows],
    )
