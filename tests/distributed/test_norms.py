"""The inf-norm in every layout, and a NaN that only one rank has."""

from pathlib import Path

import pytest
import torch

from tests.support.gates import gate_of
from tests.support.tiers import tiered
from tests.support.tiny import global_batch, make_job, tiny
from titan_moe.config.job_config import JobConfig
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.verify.gradients.gate import Gate
from titan_moe.verify.layouts.layouts import parse


@pytest.fixture(scope="module")
def inf_norm_gate(tmp_path_factory) -> Gate:
    """The gate, with steps clipped by the largest gradient."""
    gate = gate_of("deepseek_v3", Path(tmp_path_factory.mktemp("inf")))
    clipped = gate.job.training.model_copy(update={"norm_type": "inf", "max_norm": 1e-3})
    gate.job = gate.job.model_copy(update={"training": clipped})
    return gate


@pytest.mark.parametrize(
    "layout", tiered(["dp_shard=2,ep=2"], slow=["pp=2,tp=2,ep=2"], full=["dp_shard=1"])
)
def test_the_inf_norm_is_the_largest_gradient(inf_norm_gate: Gate, layout: str):
    result = inf_norm_gate.verify(parse(layout))
    assert result.passed, "\n".join([*result.lines, result.traceback])


def nan_in_one_gradient(job: JobConfig, bad_rank: int) -> bool:
    """Whether a step is finite with a NaN in one rank's piece of one gradient."""
    import torch.distributed as dist

    from titan_moe import train_step as module
    from titan_moe.data.batch import Batch
    from titan_moe.distributed.parallelize import build_sharded_model
    from titan_moe.optim.optimizers import build_optimizer

    total = module.grad_norm.sum_of_squares

    def poison(parameters, ranks_per_stage):
        if dist.get_rank() == bad_rank:
            module.grad_norm.local_grads(parameters)[-1].flatten()[0] = float("nan")
        return total(parameters, ranks_per_stage)

    module.grad_norm.sum_of_squares = poison
    device = torch.device("cpu")
    sharded = build_sharded_model(job, tiny(job), device=device, world_size=2)
    optimizer = build_optimizer(job.optimizer, sharded.named_parameters())
    step = module.TrainStep(sharded, optimizer, job.training, device=device)
    tokens, labels, documents = (x[:1] for x in global_batch(0, sharded.config.vocab_size))
    return step([Batch(tokens, labels, documents, [[]])]).finite


@pytest.mark.parametrize("bad_rank", tiered([1], slow=[0]))
@pytest.mark.parametrize("norm_type", ["2", "inf"])
def test_a_nan_on_one_rank_is_seen_by_all(norm_type: str, bad_rank: int):
    parallelism = {"expert_parallel_degree": 2}
    job = make_job("deepseek_v3", training={"norm_type": norm_type}, parallelism=parallelism)
    assert run_on_ranks(nan_in_one_gradient, 2, job, bad_rank) == [False, False]
    assert run_on_ranks(nan_in_one_gradient, 2, job, -1) == [True, True]
