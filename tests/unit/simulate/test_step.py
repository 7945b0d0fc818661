"""`titan-moe simulate step`: what one rank of a world of any size sends and owns."""

from dataclasses import replace

import pytest
import torch

from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import resolve
from titan_moe.models.hf import model_of_job
from titan_moe.runtime.process_pool import in_fresh_processes
from titan_moe.simulate.fake_rank import balanced_choice
from titan_moe.simulate.step import Task, measure


def task(world_size: int, dtype: str = "bfloat16") -> Task:
    """Two layers that 1,024 ranks can cut."""
    job = JobConfig.model_validate(
        {
            "model": {"name": "deepseek_v3", "flavor": "2M"},
            "training": {"seq_len": 64, "local_batch_size": 1, "mixed_precision_param": dtype},
            "parallelism": {"expert_parallel_degree": 8},
            "activation_checkpoint": {"mode": "none"},
        }
    )
    config = model_of_job(job.model)
    assert config.moe is not None
    moe = replace(config.moe, num_experts=8, hidden_dim=1024)
    config = replace(config, dim=1024, hidden_dim=1024, vocab_size=1024, num_layers=2, moe=moe)
    return resolve(job, world_size), config, world_size, 0


def test_nothing_of_a_rank_grows_with_the_world_but_its_shard_shrinks() -> None:
    tasks = [task(8), task(8, "float32"), task(1024)]
    small, wide, large = (
        facts for _, facts in sorted(in_fresh_processes(measure, tasks, num_workers=1))
    )
    rows = [facts.traffic["ep"]["all_to_all"] for facts in (small, wide, large)]
    assert rows[0][0] == rows[1][0] and rows[1][1] / rows[0][1] == pytest.approx(2, rel=0.01)
    # Bytes to a layer's experts depend on the batch, not on the world.
    assert rows[2] == rows[0]
    assert small.num_groups <= large.num_groups <= 4
    assert large.parameter_bytes < small.parameter_bytes / 50
    assert "1,024 ranks" in large.in_words()


def test_balanced_choice_gives_all_experts_as_many_tokens() -> None:
    experts_TK = balanced_choice(16, 4)(torch.zeros(64, 16))
    assert experts_TK.flatten().bincount(minlength=16).tolist() == [16] * 16
    assert all(len(set(row)) == 4 for row in experts_TK.tolist())
