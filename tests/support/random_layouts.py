"""Configurations drawn at random: most of them legal, the others illegal in one way or in several.

For tests that each one either trains or is refused with a line for every reason.
"""

import random
import re
from dataclasses import replace
from typing import Any, NamedTuple

from titan_moe.config.checks.job import check
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import resolve
from titan_moe.config.pipeline import SCHEDULES
from titan_moe.models.config import ModelConfig
from titan_moe.models.registry import FAMILIES, model_config

# A key and its value, or a table and its degrees; then all that it may be, or the reason and,
# after a colon or semicolon, what to do.
_WELL_FORMED = re.compile(
    r"[a-z_]+(\.[a-z_0-9]+(=\S+)?)?:? "
    r"(must be (-1 or at least 1|a positive integer N, .*)"
    r"|.+[:;] (choose|start it with|set|leave|add|keep|give|once is enough) ?.*)",
)


class Drawn(NamedTuple):
    """One configuration."""

    job: JobConfig
    model: ModelConfig
    ranks: int

    def problems(self) -> list[str]:
        """What the checks say."""
        return check(self.job, self.model, self.ranks)

    def resolved(self) -> JobConfig:
        """As a run of it would have it, once there are no problems."""
        return resolve(self.job, self.ranks)


def ill_formed(lines: list[str]) -> list[str]:
    """The lines that do not name key, value and remedy."""
    return [line for line in lines if not _WELL_FORMED.fullmatch(line)]


def draw(chance: random.Random, *, wild: float) -> Drawn:
    """A gate model in a random layout; each choice is wild (any number) with a probability."""
    family = chance.choice(FAMILIES)
    ranks = chance.randint(1, 8)
    model = replace(model_config(family, "gate"), num_layers=chance.randint(1, 8))

    def pick(legal: list[Any], anything: list[Any]) -> Any:
        return chance.choice(anything if chance.random() < wild else legal)

    pp, replicate, cp, tp, shard = _degrees(chance, ranks)
    block = shard * cp * tp
    ep = pick([n for n in _divisors(block) if 8 % n == 0], list(range(1, 9)))
    etp = pick([n for n in _divisors(block // ep or 1) if 32 % n == 0], list(range(1, 9)))
    schedule = chance.choice(list(SCHEDULES))
    microbatch = chance.choice([1, 1, 1, 2, 3])
    local = microbatch * pick([2 * pp, 4 * pp], [1, 2, 3, 5])
    split = SCHEDULES[schedule].splits_backward and pp > 1
    parallelism = {
        "pipeline_parallel_degree": pick([pp], [1, 2, 3, 8]),
        "data_parallel_replicate_degree": replicate,
        "data_parallel_shard_degree": pick([shard, -1], [1, 2, 3]),
        "context_parallel_degree": cp,
        "tensor_parallel_degree": tp,
        "expert_parallel_degree": ep,
        "expert_tensor_parallel_degree": etp,
        "fsdp_reshard_after_forward": chance.choice(["default", "always", "never"]),
        "context_parallel_rotate_method": chance.choice(["allgather", "ulysses", "ring"]),
        "context_parallel_load_balancer": chance.choice(["headtail", "none"]),
        "pipeline_parallel_schedule": schedule,
        "pipeline_parallel_microbatch_size": microbatch,
        "pipeline_parallel_layers_per_stage": pick([None], [1, 2, 3]),
        "pipeline_parallel_first_stage_less_layers": pick([None], [0, 1, 2]),
    }
    # Drawn apart, so that whatever is drawn here leaves the rest as it is.
    apart = random.Random(str((family, ranks, pp, ep, etp, local)))
    parallelism |= _dispatch(apart, ranks, ep, etp, wild=apart.random() < wild)
    recompute = ["none"] if split else ["none", "full", "selective"]
    job = JobConfig.model_validate(
        {
            "model": {"name": family, "flavor": "gate"},
            "parallelism": parallelism,
            "activation_checkpoint": {
                "mode": pick(recompute, ["none", "full", "selective"]),
                "selective_ac_option": chance.choice(["1", "2", "op"]),
            },
            "training": {
                "local_batch_size": local,
                "global_batch_size": pick(
                    [n * local * replicate * shard for n in (1, 2)], [-1, 7, 64]
                ),
                "seq_len": pick([2 * cp * tp, 6 * cp * tp], list(range(1, 40))),
                "dtype": "float64",
                "mask_documents": chance.random() < 0.7,
            },
            "moe": {"row_alignment": chance.choice([1, 16])},
        }
    )
    return Drawn(job, model, ranks)


def _dispatch(
    chance: random.Random, ranks: int, ep: int, etp: int, *, wild: bool
) -> dict[str, Any]:
    """How tokens travel."""
    if wild:
        keys = {"comm_backend": "deduplicated", "capacity_factor": 1.5, "ranks_per_node": 3}
        named = chance.sample(list(keys), 2)
        return {f"expert_parallel_{key}": keys[key] for key in named}
    ways: list[dict[str, Any]] = [{}, {"expert_parallel_comm_backend": "deduplicated"}]
    if ranks % 2 == 0:
        ways.append({**ways[1], "expert_parallel_ranks_per_node": 2})
    if ep * etp > 1:
        ways.append({"expert_parallel_capacity_factor": float(ep)})  # All fit, always.
    return chance.choice(ways)


def _degrees(chance: random.Random, ranks: int) -> list[int]:
    """Five factors of the ranks, in any order."""
    factors = []
    for _ in range(4):
        factors.append(chance.choice(_divisors(ranks)))
        ranks //= factors[-1]
    factors.append(ranks)
    chance.shuffle(factors)
    return factors


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
