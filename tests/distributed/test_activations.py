"""Layers with other activations, not gated ones among them, have one process's gradients in a
layout."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.gated_cases import ACTIVATIONS
from tests.support.tiers import tiered
from tests.support.tiny import FirstGradients, batch_of, largest_error, make_job, tiny, tiny_step
from titan_moe.config.job_config import JobConfig
from titan_moe.runtime.ranks import run_on_ranks

AXES = ("data_parallel_shard", "tensor_parallel", "expert_parallel", "expert_tensor_parallel")
KINDS: dict[str, dict[str, Any]] = {
    "weighted outputs": {},
    "weighted inputs": {"weights_scale": "inputs"},
    "adapters": {"projection_bias": True},
}


def first_gradients(job: JobConfig, name: str, kind: str) -> dict[str, torch.Tensor]:
    """Returns the whole gradients of a step."""
    config, activation = tiny(job), ACTIVATIONS[name]
    moe = replace(config.moe, activation=activation, **KINDS[kind])
    sharded, step = tiny_step(job, replace(config, activation=activation, moe=moe))
    with torch.no_grad():
        for _, parameter in sharded.named_parameters():  # B of an adapter begins at zero.
            parameter.add_(0.01)
    seen = FirstGradients(sharded)
    size = job.training.local_batch_size
    place = sharded.meshes.dims.coordinate(dist.get_rank(), "batch")
    step([batch_of(0, slice(place * size, (place + 1) * size))], observer=seen)
    return seen.found


@pytest.mark.parametrize("mode", tiered(["op"], slow=["full"]))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", tiered(["Nemotron 3"], slow=["Step-3.7", "Gemma 4"]))
def test_layout_has_the_gradients_of_one_process(name: str, kind: str, mode: str):
    def found(size: int, **tables: Any) -> dict[str, torch.Tensor]:
        tables["lora"] = {"rank": 3 if kind == "adapters" else None}
        job = make_job("deepseek_v3", training={"local_batch_size": size}, **tables)
        return run_on_ranks(first_gradients, 4 if size == 2 else 1, job, name, kind)[0]

    recompute = (
        {"mode": "selective", "selective_ac_option": "op"} if mode == "op" else {"mode": mode}
    )
    degrees = {f"{axis}_degree": 2 for axis in AXES}
    cut = found(2, parallelism=degrees, activation_checkpoint=recompute)
    whole = found(4)
    assert cut.keys() == whole.keys() and any(".moe.experts." in name for name in whole)
    assert largest_error(cut, whole) < 1e-10
