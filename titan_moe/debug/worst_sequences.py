"""The sequences of a bad step with the largest losses, for events.jsonl.

The loss of a step is a sum over target tokens, and a normal step never has a part of it by itself.
So a bad step's sequences run forward once more, one at a time and without gradients. That costs
about the time of the step's forward, and a step that updates normally pays nothing.
"""

import math
from typing import Any

import torch
import torch.distributed as dist

from titan_moe.data.batch import IGNORE_INDEX, Batch
from titan_moe.distributed.parallelize import ShardedModel
from titan_moe.moe.layer import take_dropped
from titan_moe.train_step import local_batch

_KEPT = 8


@torch.no_grad()
def worst_sequences(
    sharded: ShardedModel, batches: list[Batch], device: torch.device
) -> list[dict[str, Any]]:
    """Returns up to 8 sequences of the step, the largest mean loss first; the same on every rank.

    Each is {"loss": nats per target token, "targets": number of them, "documents": source and name
    of each document in it}. A loss that is not finite comes before all others. Collective over all
    ranks, in every layout; leaves no trace in the model.
    """
    rows = [row for batch in batches for row in _rows(batch)]
    sharded.train(False)
    # A compiled layer would be compiled again for one row.
    with torch.compiler.set_stance("force_eager"):
        losses = [sharded.execution.evaluate(local_batch(row, sharded, device)) for row in rows]
    sharded.train(True)
    take_dropped(sharded.moe_layers().values(), device)

    # Ranks with the same sequences hold shares of their losses: one row of the table sums them.
    dims, rank = sharded.meshes.dims, sharded.meshes.rank
    sums_NR = torch.zeros(dims.size("batch"), len(rows), dtype=torch.float64, device=device)
    sums_NR[dims.coordinate(rank, "batch")] = torch.stack(losses)
    dist.all_reduce(sums_NR)
    targets = [int((row.labels_BS != IGNORE_INDEX).sum()) for row in rows]
    read = [(number, row.samples[0]) for number, row in zip(targets, rows, strict=True)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (dims.coordinate(rank, "batch"), read))

    sequences = [
        {"loss": total / num_targets, "targets": num_targets, "documents": documents}
        for coordinate, sequences in dict(everyone).items()
        for total, (num_targets, documents) in zip(
            sums_NR[coordinate].tolist(), sequences, strict=True
        )
        if num_targets
    ]
    return sorted(sequences, key=_badness, reverse=True)[:_KEPT]


def _badness(sequence: dict[str, Any]) -> float:
    return sequence["loss"] if math.isfinite(sequence["loss"]) else math.inf


def _rows(batch: Batch) -> list[Batch]:
    return [
        Batch(
            batch.tokens_BS[row : row + 1],
            batch.labels_BS[row : row + 1],
            batch.documents_BS[row : row + 1],
            [documents],
        )
        for row, documents in enumerate(batch.samples)
    ]
