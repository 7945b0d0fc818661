"""What a layer of a shipped configuration costs one rank, in one microbatch and in a step."""

from dataclasses import asdict
from typing import Any

from scripts.rehearsal.cases import LAYERS, Case, shipped_cases
from scripts.rehearsal.ledger import Counts
from scripts.rehearsal.rank import Rehearsal, rehearse


def counted_cases(word: str) -> list[tuple[Case, Case]]:
    """Each configuration without a pipeline, of LAYERS layers and of twice as many."""
    pairs = zip(shipped_cases(LAYERS), shipped_cases(2 * LAYERS), strict=True)
    return [
        (shallow, deep)
        for shallow, deep in pairs
        if word in shallow.name and shallow.config.num_layers < deep.config.num_layers
    ]


def count_layers(shallow: Case, deep: Case) -> dict[str, Any]:
    """Counts of the deeper model less those of the other, by the layers between them: forward,
    recomputation and backward of one. In a fresh process."""
    rehearsals = [
        rehearse(case.resolved(), case.config, case.world_size, case.rank)
        for case in (shallow, deep)
    ]
    few, many = (_complete(each) for each in rehearsals)
    layers = deep.config.num_layers - shallow.config.num_layers
    training = deep.job.training
    return {
        "world_size": deep.world_size,
        "tokens": training.local_batch_size * training.seq_len,
        "layer": asdict((many["microbatch"] - few["microbatch"]) / layers),
        "beside_layers": asdict(
            few["microbatch"]
            - (many["microbatch"] - few["microbatch"]) / layers * shallow.config.num_layers
        ),
        "layer_kernels": _per_layer(rehearsals, layers),
        "update_of_a_layer": asdict((many["update"] - few["update"]) / layers),
    }


def _complete(found: Rehearsal) -> dict[str, Counts]:
    if found.microbatch is None or found.update is None:
        raise RuntimeError("; ".join(str(finding) for finding in found.findings))
    return {"microbatch": found.microbatch, "update": found.update}


def _per_layer(rehearsals: list[Rehearsal], layers: int) -> dict[str, float]:
    few, many = (found.kernels for found in rehearsals)
    each = {name: (calls - few.get(name, 0)) / layers for name, calls in many.items()}
    return {name: calls for name, calls in sorted(each.items(), key=lambda item: -item[1]) if calls}


def in_words(name: str, found: dict[str, Any]) -> str:
    """A line of a table."""
    layer = found["layer"]
    return (
        f"{name}: a layer and microbatch of {found['tokens']:,} tokens: "
        f"{layer['kernels']:.0f} kernels, {layer['dispatches']:.0f} dispatches, "
        f"{layer['bytes_moved'] / 1e9:.2f} GB moved, {layer['collectives']:.0f} collectives of "
        f"{layer['bytes_sent'] / 1e9:.3f} GB, {layer['waits']:.0f} waits"
    )
