"""A run goes on in any other layout, from its checkpoint or without a stop: the same bits by name,
the same global batches, the same curve."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.gates import OTHERS, SAMPLE, fitting
from tests.support.resharding import LEG, Run, go_on, make_job, problems, run, unlike
from tests.support.tiers import tiered
from tests.support.trainings import process_here
from titan_moe.checkpoint import tensors
from titan_moe.checkpoint.checksums import checksums
from titan_moe.checkpoint.tensors import MODEL, model_tensors
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.data.loader import Loader
from titan_moe.distributed import transfer
from titan_moe.models.config import ModelConfig
from titan_moe.models.registry import FAMILIES, model_config
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.training import trainer as trainers
from titan_moe.training.trainer import Trainer
from titan_moe.verify.layouts.layouts import Layout, depth, parse

_V3, _QWEN = "deepseek_v3", "qwen3"

# (family, before, after).
SHORT = [
    (_QWEN, "dp_shard=2", "tp=2"),
    (_V3, "dp_shard=4,etp=4", "dp_replicate=2,cp=2"),
    (_V3, "dp_shard=2,tp=2", "cp=2,tp=2,etp=4,cp_method=ulysses"),
    (_QWEN, "pp=2,schedule=1F1B", "dp_shard=2,ep=2"),
    (_V3, "dp_shard=2,ep=2", "pp=2,schedule=Interleaved1F1B"),
    (_V3, "pp=4,schedule=1F1B", "tp=2,dp_shard=2,ep=2,etp=2"),
    (_V3, "dp_shard=2,cp=2,tp=2,ep=8", "dp_replicate=2,dp_shard=4"),
    (_V3, "pp=2,dp_shard=2,tp=2,ep=2,schedule=Interleaved1F1B", "cp=2,ep=2"),
    (_V3, "pp=2,tp=2,ep=2,schedule=DualPipeV", "pp=2,dp_shard=3,schedule=GPipe"),
    (_QWEN, "dp_shard=3,tp=2,ep=2", "dp_shard=4"),
    *((family, "tp=2,dp_shard=2,ep=2,etp=2", "pp=2,cp=2,ep=2") for family in OTHERS),
]
# Each layout of the gate's sample with another one of it: 30 pairs for each family.
SAMPLED = list(zip(SAMPLE, [*SAMPLE[7:], *SAMPLE[:7]], strict=True))

Undisturbed = Callable[[str, Layout, int], Run]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Makes each run that never stops once, by family, layout and depth."""

    @cache
    def made(family: str, layout: Layout, num_layers: int) -> Run:
        folder = tmp_path_factory.mktemp("undisturbed")
        return run(family, layout, folder, steps=2 * LEG, depth=num_layers)

    return made


def check(
    folder: Path,
    undisturbed: Undisturbed,
    family: str,
    before: str,
    after: str,
    plant: Callable[[], None] | None = None,
) -> list[str]:
    """Resumes in the other layout and, with as many ranks, changes to it while training.

    `plant` makes a mistake in the second of the two.
    """
    source, target = (parse(fitting(family, text)) for text in (before, after))
    num_layers = max(depth(source), depth(target))
    reference = undisturbed(family, source, num_layers)
    ours = go_on(family, reference, target, folder / "resumed", depth=num_layers)
    lines = problems(reference, ours)
    if source.world_size == target.world_size:
        how = {"steps": 2 * LEG, "depth": num_layers, "after": target, "plant": plant}
        lines += unlike(run(family, source, folder / "live", **how), ours)
    return lines


@pytest.mark.parametrize(
    "family, before, after",
    tiered(
        SHORT[:1],
        slow=SHORT[1:6],
        full=[*SHORT[6:], *((family, *pair) for family in FAMILIES for pair in SAMPLED)],
    ),
)
def test_run_goes_on_in_another_layout(
    tmp_path: Path, undisturbed: Undisturbed, family: str, before: str, after: str
) -> None:
    assert check(tmp_path, undisturbed, family, before, after) == []


# --- the test can fail ----------------------------------------------------------------------------


def _move_parameters_only() -> None:
    def move(sources, targets):
        moving = {name: each for name, each in sources.items() if name.startswith(MODEL)}
        return transfer.move(moving, {name: targets[name] for name in moving})

    trainers.move = move


def _begin_data_anew() -> None:
    Loader.load_state_dict = lambda *_: None


def _keep_cycles() -> None:
    trainers.collect_everything = lambda: None


@pytest.mark.parametrize(
    "plant, says",
    tiered(
        [],
        slow=[
            (_move_parameters_only, "exp_avg output.weight is another afterwards"),
            (_begin_data_anew, "step 3 has another global batch"),
            (_keep_cycles, "still in memory: "),
        ],
    ),
)
def test_state_that_a_change_of_layout_leaves_behind_is_noticed(
    tmp_path: Path, undisturbed: Undisturbed, plant: Callable[[], None], says: str
) -> None:
    lines = check(tmp_path, undisturbed, *SHORT[0], plant)
    assert any(line.startswith(says) for line in lines), lines


def _shift_strided_shards() -> None:
    """Strided shards are said to lie one shard further, at loading and for the checksums alike:
    production's own check sees nothing."""
    slices = tensors.local_slices

    def shifted(tensor):
        box = list(slices(tensor))
        for placement in getattr(tensor, "placements", ()):
            if isinstance(placement, _StridedShard):
                dim, held = placement.dim, box[placement.dim]
                size = held.stop - held.start
                first = (held.start + size) % tensor.shape[dim]
                box[dim] = slice(first, first + size)
        return tuple(box)

    tensors.local_slices = shifted


@pytest.mark.slow
def test_a_shifted_strided_shard_is_noticed(tmp_path: Path, undisturbed: Undisturbed) -> None:
    reference = undisturbed(_V3, parse("dp_shard=2"), 3)
    target, plant = parse("dp_shard=2,tp=2"), _shift_strided_shards
    lines = problems(reference, go_on(_V3, reference, target, tmp_path, depth=3, plant=plant))
    for kind in ("parameter", "exp_avg", "exp_avg_sq"):
        assert f"{kind} output.weight is not what was saved" in lines
    assert not any("norm.weight is not" in line for line in lines), "it has no strided shards"
    assert not any("checksums" in line for line in lines), "production's check cannot see it"


def reshard_around_training(before: JobConfig, config: ModelConfig, after: JobConfig) -> list[dict]:
    """Changes to a layout before the first step, and back after the last one; returns the checksums
    of all parameters before and after the latter."""
    trainer = Trainer(before, config, process_here())
    trainer.reshard(after)
    trainer.train()
    sums = [checksums(model_tensors(trainer.sharded.parts))]
    trainer.reshard(before)
    return [*sums, checksums(model_tensors(trainer.sharded.parts))]


def test_run_changes_its_layout_before_its_first_step_and_after_its_last(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    before, after = parse("dp_shard=2"), parse("tp=2")
    there = undisturbed(_QWEN, after, 2)
    jobs = [make_job(_QWEN, layout, tmp_path, steps=2 * LEG) for layout in (before, after)]
    config = replace(model_config(_QWEN, "gate"), num_layers=2)
    for trained, moved in run_on_ranks(reshard_around_training, 2, jobs[0], config, jobs[1]):
        assert trained == moved
    ours = Run(tmp_path, [])
    for step in range(1, 2 * LEG + 1):
        keys = ("loss", "grad_norm", "data")
        assert ours.logged(step, *keys) == there.logged(step, *keys)


def refuse(before: JobConfig, config: ModelConfig, jobs: list[JobConfig]) -> list[list[str]]:
    trainer = Trainer(before, config, process_here())
    model, found = trainer.sharded, []
    for job in jobs:
        with pytest.raises(ConfigError) as error:
            trainer.reshard(job)
        found.append(error.value.lines)
    assert trainer.sharded is model and trainer.job is before
    return found


def test_reshard_refuses_another_world_or_rate_before_anything_moves(tmp_path: Path) -> None:
    before, wide, other = (
        make_job(_QWEN, parse(layout), tmp_path, steps=LEG, optimizer=optimizer)
        for layout, optimizer in [("dp_shard=2", {}), ("dp_shard=4", {}), ("tp=2", {"lr": 0.5})]
    )
    config = replace(model_config(_QWEN, "gate"), num_layers=2)
    for too_many, rate in run_on_ranks(refuse, 2, before, config, [wide, other]):
        assert len(too_many) == 1 and "4" in too_many[0] and "2" in too_many[0]
        expected = f"optimizer.lr=0.5, and the run has {before.optimizer.lr}: set it to that"
        assert len(rate) == 1 and rate[0].startswith(expected)
