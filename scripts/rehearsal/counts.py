"""Counts the cost of one layer of a shipped configuration, for one rank and microbatch.

A model of LAYERS layers and one of twice as many are rehearsed; their difference is that of the
layers between them. The microbatch is the second of three: FSDP may do otherwise in a step's first
and last one.
"""

from dataclasses import asdict
from typing import Any

from scripts.rehearsal.cases import LAYERS, Case, shipped_cases
from scripts.rehearsal.ledger import Counts
from scripts.rehearsal.rank import rehearse
from titan_moe.runtime.revision import running_code


def counted_cases(word: str) -> list[tuple[Case, Case]]:
    """Returns each configuration without a pipeline, with LAYERS layers and with twice as many."""
    pairs = zip(shipped_cases(LAYERS), shipped_cases(2 * LAYERS), strict=True)
    return [
        (shallow, deep)
        for shallow, deep in pairs
        if word in shallow.name and shallow.config.num_layers < deep.config.num_layers
    ]


def count_layers(shallow: Case, deep: Case) -> dict[str, Any]:
    """Returns the counts of one configuration, as JSON. Runs in a fresh process."""
    middle = []
    for case in (shallow, deep):
        done = rehearse(case, microbatches=3)
        if not done.microbatches:
            raise RuntimeError("; ".join(str(finding) for finding in done.findings))
        middle.append(done.microbatches[1])
    few, many = middle
    layer = (many - few) / (deep.config.num_layers - shallow.config.num_layers)
    training, degrees = deep.job.training, deep.job.parallelism
    sequences = training.local_batch_size * training.seq_len
    return {
        "commit": str(running_code().get("commit", "unknown"))[:7],
        "world_size": deep.world_size,
        "tokens": sequences // degrees.context_parallel_degree,
        "layer": asdict(layer),
        "beside_layers": asdict(few - layer * shallow.config.num_layers),
    }


def in_words(name: str, counted: dict[str, Any]) -> str:
    """Returns a line of a table."""
    layer = Counts(**counted["layer"])
    return (
        f"{name}: a layer and microbatch of {counted['tokens']:,} tokens: "
        f"{layer.kernels:.0f} kernels, {layer.dispatches:.0f} dispatches, "
        f"{layer.bytes_moved / 1e9:.2f} GB moved, {layer.collectives:.0f} collectives of "
        f"{layer.bytes_sent / 1e9:.3f} GB, {layer.waits:.0f} waits"
    )
