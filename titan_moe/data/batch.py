"""The microbatch that the loader hands to the trainer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

from titan_moe.data.packing import IGNORE_INDEX, PackedSequence

if TYPE_CHECKING:
    import torch

__all__ = ["IGNORE_INDEX", "Batch", "fingerprints", "stack_sequences"]


@dataclass(frozen=True)
class Batch:
    """One microbatch of one data rank, as CPU tensors.

    tokens_BS: int64, the input.
    labels_BS: int64, the next token at each position; IGNORE_INDEX where there is no target.
    documents_BS: int32, each token's document within its sequence (0, 1, 2, ...), for masks.
    samples: for each sequence the identifiers of the documents it holds, for error reports.
    """

    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor
    documents_BS: torch.Tensor
    samples: list[list[str]]


def fingerprints(batch: Batch) -> list[int]:
    """CRC32 of each sequence's tokens, labels and documents, the same in every layout."""
    sequences = zip(batch.tokens_BS, batch.labels_BS, batch.documents_BS, strict=True)
    return [reduce(lambda crc, x_S: crc32(x_S.numpy(), crc), sequence, 0) for sequence in sequences]


def stack_sequences(sequences: Sequence[PackedSequence], *, pin: bool = False) -> Batch:
    """Stack the sequences of one microbatch.

    pin: in page-locked memory, from which CUDA copies without waiting. torch gives such memory out
    again once the tensor is gone and copies from it have ended.
    """
    import torch  # Here, so that the checks before a run need not wait for torch.

    def stack(arrays: Iterable[np.ndarray]) -> torch.Tensor:
        x = torch.from_numpy(np.stack(list(arrays)))
        return x.pin_memory() if pin else x

    return Batch(
        tokens_BS=stack(sequence.tokens_S for sequence in sequences),
        labels_BS=stack(sequence.labels_S for sequence in sequences),
        documents_BS=stack(sequence.documents_S for sequence in sequences),
        samples=[sequence.samples for sequence in sequences],
    )
