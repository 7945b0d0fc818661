"""Each rank's part of a model that is cut into pipeline stages, by arithmetic. No torch."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from titan_moe.config import pipeline
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Parallelism, Training
from titan_moe.config.pipeline_order import pipeline_order
from titan_moe.models.config import ModelConfig
from titan_moe.models.stats import Size, part_sizes, part_weights


class Share(NamedTuple):
    """One rank's part of the model, and how much of the batch it has between forward and
    backward at the worst moment."""

    parts: dict[str, Size]
    rows: int
    """Sequences of one microbatch."""
    layers: int
    """Sum over these microbatches of the layers that each has passed here."""
    losses: int
    """Microbatches whose loss is computed and whose backward is still to come."""
    streams: int
    """Microbatches' inputs, outputs and gradients that wait at borders of stages."""


def shares_of_ranks(
    config: ModelConfig, training: Training, parallelism: Parallelism
) -> Iterator[Share]:
    """Yields the share of each rank of one pipeline; the whole model where there is none.

    Raises ConfigError for a pipeline that this model cannot be cut into.
    """
    sizes, rows = part_sizes(config), training.local_batch_size
    ranks = parallelism.pipeline_parallel_degree
    if ranks == 1:
        yield Share(sizes, rows, config.num_layers + config.num_mtp_layers, 1, 0)
        return
    if wrong := pipeline.problems(parallelism, num_layers=config.num_layers, local_batch_size=rows):
        raise ConfigError(wrong)
    weights = part_weights(config, training.seq_len)
    stages = pipeline.model_parts(parallelism, weights, config.num_layers)
    layers = [sum(name.startswith("layers.") for name in stage) for stage in stages]
    layers[-1] += config.num_mtp_layers
    stages[-1] += [name for name in sizes if name == "mtp"]
    schedule, last = pipeline.schedule_of(parallelism), len(stages) - 1
    count = pipeline.num_microbatches(parallelism, rows)
    for rank, order in enumerate(pipeline_order(schedule.name, ranks, len(stages), count)):
        own = pipeline.stages_of_rank(schedule, rank, ranks, len(stages))
        live, passed, losses, outputs = Counter[int](), 0, 0, 0
        for work in (work for slot in order for work in slot):
            live[work.stage] += {"F": 1, "I": 0, "B": -1, "W": -1}[work.kind]
            passed = max(passed, sum(layers[stage] * live[stage] for stage in own))
            losses, outputs = max(losses, live[last]), max(outputs, live.total())
        parts = {name: sizes[name] for stage in own for name in stages[stage]}
        # Torch has a buffer for the input, and for the output's gradient, of every microbatch.
        streams = outputs + 2 * count * len(own)
        yield Share(parts, parallelism.pipeline_parallel_microbatch_size, passed, losses, streams)
