"""The law of growing worlds: the program keeps it, and a planted line that breaks it is caught."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.commands import run_command
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import resolve
from titan_moe.models.config import ModelConfig
from titan_moe.models.hf import model_of_job
from titan_moe.runtime.process_pool import in_fresh_processes
from titan_moe.simulate.fake_rank import balanced_choice
from titan_moe.simulate.scaling import RankFacts, measure, violations

WORLDS = (8, 64, 1024)


def task(world_size: int, **degrees: int) -> tuple[JobConfig, ModelConfig, int]:
    """Two layers that 1,024 ranks can cut."""
    degrees = {"expert_parallel_degree": 8} | degrees
    job = JobConfig.model_validate(
        {
            "model": {"name": "deepseek_v3", "flavor": "2M"},
            "training": {"seq_len": 64, "local_batch_size": 1},
            "parallelism": degrees,
            "activation_checkpoint": {"mode": "none"},
        }
    )
    config = model_of_job(job.model)
    assert config.moe is not None
    moe = replace(config.moe, num_experts=8, hidden_dim=1024)
    config = replace(
        config, dim=1024, hidden_dim=1024, vocab_size=1024, num_layers=2, moe=moe, max_seq_len=64
    )
    return resolve(job, world_size), config, world_size


def test_a_step_in_float32_sends_twice_what_one_in_bfloat16_does() -> None:
    job, config, world_size = task(8)
    wide = job.training.model_copy(update={"mixed_precision_param": "float32"})
    tasks = [(job, config, world_size), (job.model_copy(update={"training": wide}), config, 8)]
    narrow, twice = (facts for _, facts in in_fresh_processes(measure, tasks, num_workers=1))
    rows = [facts.traffic["ep"]["all_to_all"] for facts in (narrow, twice)]
    assert rows[0][0] == rows[1][0]
    assert rows[1][1] / rows[0][1] == pytest.approx(2, rel=0.01)


def with_planted(bug: str, *arguments: object) -> RankFacts:
    """`measure`, with a line changed."""
    if bug == "every rank makes all groups":
        from titan_moe.distributed.process_groups import ProcessGroups

        get = ProcessGroups.get

        def make_all(self, ranks, options, *more):  # type: ignore[no-untyped-def]
            known = len(self._groups)
            group = get(self, ranks, options, *more)
            if len(self._groups) > known and len(ranks) > 1:
                for _ in range(dist.get_world_size() // len(ranks) - 1):
                    dist.new_group(list(ranks), use_local_synchronization=True)
            return group

        with mock.patch.object(ProcessGroups, "get", make_all):
            return measure(*arguments)  # type: ignore[arg-type]

    from titan_moe.train_step import TrainStep

    reduce = TrainStep._reduce

    def gather_all(self, *arguments, **more):  # type: ignore[no-untyped-def]
        own = torch.zeros(1000)
        dist.all_gather_into_tensor(torch.zeros(1000 * dist.get_world_size()), own)
        return reduce(self, *arguments, **more)

    with mock.patch.object(TrainStep, "_reduce", gather_all):
        return measure(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "degrees",
    [
        pytest.param({}, id="one shard of the world"),
        pytest.param({"data_parallel_shard_degree": 8}, id="replicas of eight"),
    ],
)
def test_nothing_grows_with_the_world_faster_than_the_shard(degrees: dict[str, int]) -> None:
    tasks = [task(world_size, **each) for world_size, each in _worlds(degrees)]
    curve = [facts for _, facts in sorted(in_fresh_processes(measure, tasks, num_workers=1))]
    assert [facts.world_size for facts in curve] == list(WORLDS)
    assert violations(curve) == []
    # What is sent to a layer's experts depends on the batch, not on the world.
    assert len({facts.bytes_by_axis()["ep"] for facts in curve}) == 1
    assert max(facts.num_groups for facts in curve) <= 4
    if not degrees:
        assert curve[-1].parameter_bytes < curve[0].parameter_bytes / 50


def _worlds(degrees: dict[str, int]) -> list[tuple[int, dict[str, int]]]:
    if not degrees:
        return [(world, {}) for world in WORLDS]
    return [(w, {**degrees, "data_parallel_replicate_degree": w // 8}) for w in WORLDS]


@pytest.mark.parametrize(
    ("bug", "says"),
    [
        ("every rank makes all groups", "new_group_calls"),
        ("a step gathers from the world", "all_gather over world"),
    ],
)
def test_a_planted_violation_is_caught(bug: str, says: str) -> None:
    tasks = [(bug, *task(world_size)) for world_size in (8, 256)]
    curve = [facts for _, facts in sorted(in_fresh_processes(with_planted, tasks, num_workers=1))]
    assert any(says in line for line in violations(curve))


def test_all_experts_get_as_many_tokens_and_a_token_no_expert_twice() -> None:
    experts_TK = balanced_choice(16, 4)(torch.zeros(64, 16))
    assert experts_TK.flatten().bincount(minlength=16).tolist() == [16] * 16
    assert all(len(set(row)) == 4 for row in experts_TK.tolist())


def test_a_config_that_does_not_fit_the_ranks_is_refused() -> None:
    config = "configs/qwen3/30B-A3B_64gpu.toml"
    done = run_command("simulate", "step", "--ranks", 12, "--config", config)
    assert done.returncode == 2 and "12" in done.stderr
