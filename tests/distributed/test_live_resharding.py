"""Trainer.reshard: the bits of a run that was saved, stopped and resumed in the other layout."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.gates import OTHERS, SAMPLE
from tests.support.resharding import LEG, go_on, make_job, run_and_reshard, unlike
from tests.support.tiers import tiered
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.models.config import ModelConfig
from titan_moe.models.registry import FAMILIES, model_config
from titan_moe.runtime.process import Process
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.trainer import Trainer
from titan_moe.verify.gradients.fixture import at_depth
from titan_moe.verify.layouts.layouts import depth, parse

_V3, _QWEN = "deepseek_v3", "qwen3"

SHORT = [
    (_QWEN, "dp_shard=2", "tp=2"),
    (_QWEN, "pp=2,schedule=1F1B", "dp_shard=2,ep=2"),
    (_V3, "dp_shard=2,ep=2", "pp=2,schedule=Interleaved1F1B"),
    (_V3, "dp_shard=4,etp=4", "dp_shard=2,cp=2"),
    (_V3, "dp_replicate=2,dp_shard=2", "cp=2,tp=2,etp=4,cp_method=ulysses"),
    (_V3, "pp=4,schedule=1F1B", "tp=2,dp_shard=2,ep=2,etp=2"),
]
LONG = [
    (_V3, "dp_shard=2,cp=2,tp=2,ep=8", "dp_replicate=2,dp_shard=4"),
    (_V3, "dp_shard=8", "dp_shard=8,ep=8"),
    (_V3, "pp=4,dp_shard=2,ep=2,schedule=1F1B", "dp_shard=4,tp=2"),
    (_V3, "pp=4,schedule=ZBVZeroBubble", "pp=4,schedule=Interleaved1F1B"),
    (_V3, "pp=4,schedule=DualPipeV", "tp=4,etp=4"),
    (_V3, "pp=2,tp=2,dp_replicate=2,schedule=LoopedBFS", "cp=8,etp=2"),
    (_QWEN, "dp_shard=8,ep=8", "pp=4,tp=2,schedule=LoopedBFS"),
    (_QWEN, "dp_shard=3,cp=2,etp=2", "dp_shard=3,tp=2,ep=2"),
]


def _next_of_size(place: int) -> str:
    """In the gate's sample the next layout of as many ranks."""
    ranks = parse(SAMPLE[place]).world_size
    others = [*SAMPLE[place + 1 :], *SAMPLE[:place]]
    return next(each for each in others if parse(each).world_size == ranks)


SAMPLED = [(before, _next_of_size(place)) for place, before in enumerate(SAMPLE)]


def check(
    tmp_path: Path, family: str, before: str, after: str, plant: Callable[[], None] | None = None
) -> list[str]:
    layouts = parse(before), parse(after)
    num_layers = max(map(depth, layouts))
    live = run_and_reshard(family, layouts, tmp_path / "live", depth=num_layers, plant=plant)
    resumed = tmp_path / "resumed"
    ours = go_on(family, live, LEG, layouts[1], resumed, depth=num_layers, save_last=True)
    return unlike(live, ours)


@pytest.mark.parametrize("family, before, after", tiered(SHORT[:2], slow=SHORT[2:], full=LONG))
def test_a_run_goes_on_in_another_layout(
    tmp_path: Path, family: str, before: str, after: str
) -> None:
    assert check(tmp_path, family, before, after) == []


@pytest.mark.parametrize(
    "family, before, after",
    tiered(
        [],
        slow=[(family, "tp=2,dp_shard=2,ep=2,etp=2", "pp=2,cp=2,ep=2") for family in OTHERS],
        full=[(family, *pair) for family in FAMILIES for pair in SAMPLED],
    ),
)
def test_every_family_goes_on_in_another_layout(
    tmp_path: Path, family: str, before: str, after: str
) -> None:
    assert check(tmp_path, family, before, after) == []


# --- the test can fail ----------------------------------------------------------------------------


def _move_parameters_only() -> None:
    from titan_moe import trainer
    from titan_moe.checkpoint.tensors import MODEL
    from titan_moe.distributed import transfer

    def move(sources, targets):
        moving = {name: each for name, each in sources.items() if name.startswith(MODEL)}
        return transfer.move(moving, {name: targets[name] for name in moving})

    trainer.move = move


def _begin_data_anew() -> None:
    from titan_moe.data.loader import Loader

    Loader.load_state_dict = lambda *_: None


def _draw_other_random_numbers() -> None:
    from titan_moe import trainer

    trainer.set_random_state = lambda _: None


def _keep_cycles() -> None:
    from titan_moe import trainer

    trainer.collect_everything = lambda: None


@pytest.mark.parametrize(
    "plant, says",
    tiered(
        [(_move_parameters_only, "exp_avg output.weight is another afterwards")],
        slow=[
            (_begin_data_anew, "step 3 has another global batch"),
            (_draw_other_random_numbers, "train_state.json has another rng"),
            (_keep_cycles, "still in memory: "),
        ],
    ),
)
def test_what_does_not_move_is_noticed(
    tmp_path: Path, plant: Callable[[], None], says: str
) -> None:
    lines = check(tmp_path, _QWEN, "dp_shard=2", "dp_shard=2,ep=2", plant)
    assert any(line.startswith(says) for line in lines), lines


def refuse(before: JobConfig, config: ModelConfig, jobs: list[JobConfig]) -> list[list[str]]:
    process = Process(
        rank=dist.get_rank(), world_size=dist.get_world_size(), device=torch.device("cpu")
    )
    trainer = Trainer(before, config, process)
    model, found = trainer.sharded, []
    for job in jobs:
        with pytest.raises(ConfigError) as error:
            trainer.reshard(job)
        found.append(error.value.lines)
    assert trainer.sharded is model and trainer.job is before
    return found


def test_what_cannot_change_is_refused_before_anything_moves(tmp_path: Path) -> None:
    before, wide, other = (
        make_job(_QWEN, parse(layout), tmp_path, steps=LEG, optimizer=optimizer)
        for layout, optimizer in [("dp_shard=2", {}), ("dp_shard=4", {}), ("tp=2", {"lr": 0.5})]
    )
    config = at_depth(model_config(_QWEN, "gate"), 2)
    for too_many, rate in run_on_ranks(refuse, 2, before, config, [wide, other]):
        assert len(too_many) == 1 and "4" in too_many[0] and "2" in too_many[0]
        expected = f"optimizer.lr=0.5, and the run has {before.optimizer.lr}: set it to that"
        assert len(rate) == 1 and rate[0].startswith(expected)
