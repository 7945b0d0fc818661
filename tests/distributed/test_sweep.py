"""The sweep passes a sample of the layouts of 16, 32 and 64 ranks, and finds planted bugs."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from titan_moe.distributed import expert_parallel, fsdp, parallel_dims
from titan_moe.parallelize import policies
from titan_moe.runtime.process_pool import in_fresh_processes
from titan_moe.verify.layouts import sweep
from titan_moe.verify.layouts.layouts import Layout, parse
from titan_moe.verify.layouts.sweep import RankCheck, check_layouts, check_ranks, select_layouts


@pytest.mark.slow
def test_sweep_passes_sample():
    layouts = select_layouts([16, 32, 64], sample_size=20, seed=2)
    assert [layout.world_size for layout in layouts] == [16] * 20 + [32] * 20 + [64] * 20
    checks = list(check_layouts(layouts, num_workers=2))
    assert [line for one in checks for line in one.problems] == []
    assert len(checks) == 120 and sum(one.num_parameters for one in checks) > 5000


# --- planted bugs ---------------------------------------------------------------------------------


def _tp_outside_pp() -> Any:
    axes = ("tp", "pp", "dp_replicate", "dp_shard", "cp")
    return mock.patch.object(parallel_dims, "DENSE_AXES", axes)


def _fsdp_leaves_ranks_empty() -> Any:
    return mock.patch.object(fsdp, "shard_dim", lambda shape, num_shards: 0)


def _another_hidden_dim() -> Any:
    return mock.patch.object(expert_parallel, "_CUT_BY_ETP", {"w1": 1, "w2": 1, "w3": 1})


def _the_neighbours_stage() -> Any:
    right = policies._stages_of_ranks
    return mock.patch.object(policies, "_stages_of_ranks", lambda *how: right(*how)[::-1])


def _with_bug(plant: Callable[[], Any], layout: Layout, rank: int) -> RankCheck:
    with plant():
        return check_ranks([layout], rank)[0]


def _nodes_of_four() -> Any:
    return mock.patch.object(parallel_dims.ParallelDims, "ranks_on_node", lambda *_: 4)


_ALL_AXES = "pp=2,dp_replicate=2,dp_shard=2,cp=2,tp=4,ep=4,etp=2"
_BUGS = {
    _tp_outside_pp: (_ALL_AXES, "pp group has the ranks", "pp=2,dp_shard=8,ep=4"),
    _fsdp_leaves_ranks_empty: ("dp_shard=16,etp=2", "experts.w1 has", "tp=16,ep=16"),
    _another_hidden_dim: (_ALL_AXES, "w2 (12, 191, 192) does not divide", "dp_shard=8,tp=2,ep=4"),
    _nodes_of_four: ("dp_shard=16,ep=16,dispatch=nodes", "a group has the", "ep=4,dp_shard=16"),
    _the_neighbours_stage: (_ALL_AXES, "belongs to another rank", "dp_shard=8,tp=2"),
}


def _no_models() -> Any:
    return mock.patch.object(sweep, "_models", lambda layout: {})


def test_layout_with_nothing_compared_does_not_pass():
    tasks = [(_no_models, parse("tp=2"), 0)]
    ((_, check),) = in_fresh_processes(_with_bug, tasks, num_workers=1)
    assert check.problems == ["no parameter was compared"]


@pytest.mark.slow
@pytest.mark.parametrize("bug", _BUGS, ids=lambda bug: bug.__name__.strip("_"))
def test_sweep_names_planted_bug(bug: Callable):
    with_axis, words, without = _BUGS[bug]
    # Only ranks whose coordinates differ can show it.
    tasks = [(bug, parse(text), 11) for text in (with_axis, without)]
    found = dict(in_fresh_processes(_with_bug, tasks, num_workers=2))
    assert any(words in line for line in found[0].problems), found[0].problems
    assert found[1].problems == []
