"""What a shipped configuration costs one rank: a layer of it in words, a whole step by parts.

A model of LAYERS layers and one of twice as many are rehearsed; their difference is that of the
layers between them, and gives the whole model's counts. Likewise a step's first, second and last
microbatch give a step of as many as it has.
"""

import json
import re
from dataclasses import asdict
from typing import Any

from scripts.rehearsal.cases import LAYERS, Case, shipped_case, shipped_cases
from scripts.rehearsal.ledger import Counts
from scripts.rehearsal.rank import Rehearsal, rehearse
from scripts.rehearsal.work import Link, Part, Tally, Work, added
from titan_moe.config.job_config import JobConfig
from titan_moe.models.config import ModelConfig
from titan_moe.models.stats import part_weights
from titan_moe.runtime.revision import running_code

_MOST_MICROBATCHES = 3
_INNERMOST = re.compile(r"\{[^{}]*\}")


def counted_cases(word: str) -> list[tuple[Case, Case]]:
    """Each configuration without a pipeline, of LAYERS layers and of twice as many."""
    pairs = zip(shipped_cases(LAYERS), shipped_cases(2 * LAYERS), strict=True)
    return [
        (shallow, deep)
        for shallow, deep in pairs
        if word in shallow.name and shallow.config.num_layers < deep.config.num_layers
    ]


def count_layers(shallow: Case, deep: Case) -> dict[str, Any]:
    """The counts of one configuration, as JSON. In a fresh process."""
    job = deep.resolved()
    num_microbatches = _num_microbatches(job, deep.world_size)
    rehearsals = [
        rehearse(
            case.resolved(),
            case.config,
            case.world_size,
            case.rank,
            num_microbatches=min(num_microbatches, _MOST_MICROBATCHES),
            by_parts=True,
        )
        for case in (shallow, deep)
    ]
    for found in rehearsals:
        if found.update is None:
            raise RuntimeError("; ".join(str(finding) for finding in found.findings))
    between = deep.config.num_layers - shallow.config.num_layers
    few, many = rehearsals
    layer = (many.microbatches[-1] - few.microbatches[-1]) / between
    whole = _whole_model(deep)
    further = (whole.num_layers - shallow.config.num_layers) / between
    few_work, many_work = (_step(found, num_microbatches) for found in rehearsals)
    return {
        "commit": str(running_code().get("commit", "unknown"))[:7],
        "world_size": deep.world_size,
        "tokens": _tokens(job),
        "num_microbatches": num_microbatches,
        "model_flops": _model_flops(whole, job),
        "layer": asdict(layer),
        "beside_layers": asdict(few.microbatches[-1] - layer * shallow.config.num_layers),
        "waits": _waits(rehearsals, num_microbatches, further),
        "step": _as_json(added((few_work, 1 - further), (many_work, further))),
    }


def _whole_model(deep: Case) -> ModelConfig:
    """As the file has it."""
    return shipped_case(deep.path, deep.world_size, None).config


def _num_microbatches(job: JobConfig, world_size: int) -> int:
    parallelism = job.parallelism
    ranks = parallelism.tensor_parallel_degree * parallelism.context_parallel_degree
    sequences = job.training.local_batch_size * (world_size // ranks)
    return job.training.global_batch_size // sequences


def _tokens(job: JobConfig) -> int:
    """That a rank's group of tensor parallelism reads of a microbatch."""
    training = job.training
    sequences = training.local_batch_size * training.seq_len
    return sequences // job.parallelism.context_parallel_degree


def _model_flops(config: ModelConfig, job: JobConfig) -> dict[str, float]:
    """Of a rank and microbatch, forward and backward; of attention's scores and values apart."""
    seq_len, degree = job.training.seq_len, job.parallelism.tensor_parallel_degree
    all_flops, none = (sum(part_weights(config, length).values()) for length in (seq_len, 0))
    times = 3 * _tokens(job) / degree
    return {"products": times * none, "attention": times * (all_flops - none)}


def _step(found: Rehearsal, num_microbatches: int) -> Tally:
    """All parts of a step of so many microbatches."""
    *microbatches, update = found.work
    further = num_microbatches - len(microbatches)
    middle = microbatches[len(microbatches) // 2]
    return added(*((each, 1) for each in microbatches), (middle, further), (update, 1))


def _waits(rehearsals: list[Rehearsal], num_microbatches: int, further: float) -> float:
    few, many = (
        sum(each.waits for each in found.microbatches) * num_microbatches / len(found.microbatches)
        for found in rehearsals
    )
    return few + further * (many - few)


def _as_json(tally: Tally) -> dict[str, list[dict[str, Any]]]:
    """Work of the device, what the host dispatches, and collectives."""
    parts: list[dict[str, Any]] = []
    links: list[dict[str, Any]] = []
    for key, work in sorted(tally.items(), key=lambda item: [str(x) for x in item[0]]):
        numbers = _rounded(work)
        if isinstance(key, Link):
            links.append({**key._asdict(), **numbers})
        else:
            assert isinstance(key, Part)
            parts.append({**key._asdict(), **numbers})
    return {"parts": parts, "links": links}


def _rounded(work: Work) -> dict[str, Any]:
    """What is not 0."""
    found: dict[str, Any] = {
        k: round(v, 3) for k, v in asdict(work).items() if k != "covered" and v
    }
    if covered := {kind: round(amount) for kind, amount in work.covered.items() if amount > 0.5}:
        found["covered"] = covered
    return found


def as_text(counted: dict[str, Any]) -> str:
    """JSON with a part on each line."""
    text = json.dumps(counted, indent=1)
    return _INNERMOST.sub(lambda found: " ".join(found[0].split()), text) + "\n"


def in_words(name: str, found: dict[str, Any]) -> str:
    """A line of a table."""
    layer = Counts(**found["layer"])
    return (
        f"{name}: a layer and microbatch of {found['tokens']:,} tokens: "
        f"{layer.kernels:.0f} kernels, {layer.dispatches:.0f} dispatches, "
        f"{layer.bytes_moved / 1e9:.2f} GB moved, {layer.collectives:.0f} collectives of "
        f"{layer.bytes_sent / 1e9:.3f} GB, {layer.waits:.0f} waits"
    )
