"""Emulated float8 in layouts: where nothing that is summed over is cut, the bits of one rank;
elsewhere other scales, and no larger an error."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist

from tests.support.tiers import split, tiered
from tests.support.tiny import FirstGradients, batch_of, largest_error, make_job, tiny, tiny_step
from titan_moe.config.job_config import JobConfig
from titan_moe.distributed import tensor_parallel
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.verify.layouts.layouts import layout_tables, parse

ROWS = 8


def job_of(recipe: str | None, layout: str = "dp_shard=1") -> JobConfig:
    """Makes a job in float32, in which layouts differ by float8's rounding alone; without a recipe
    nothing is in float8."""
    parallelism = layout_tables(parse(layout))["parallelism"]
    job = make_job(
        "qwen3",
        training={
            "dtype": "float32",
            "mixed_precision_param": "float32",
            "local_batch_size": ROWS // 2,
        },
        parallelism=parallelism | {"pipeline_parallel_microbatch_size": 1},
        quantize={"linear": {"float8": {"emulate": True, "recipe_name": recipe or "rowwise"}}},
    )
    return job.with_values(model={"converters": ["quantize.linear.float8"] if recipe else []})


def one_step(job: JobConfig, planted: bool = False) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the whole gradients of a step, of microbatches of half of the rows each."""
    if planted:
        tensor_parallel.Float8Linear = type(None)
    config = tiny(job)
    config = replace(config, moe=replace(config.moe, hidden_dim=64))
    sharded, step = tiny_step(job, config)
    size = job.training.local_batch_size
    rows = [batch_of(0, slice(start, start + size)) for start in range(0, ROWS, size)]
    dims, rank = sharded.meshes.dims, dist.get_rank()
    own = rows[dims.coordinate(rank, "batch") :: dims.size("batch")]

    seen = FirstGradients(sharded)
    return step(own, observer=seen).loss, seen.found


@cache
def one_rank(recipe: str | None) -> tuple[float, dict[str, torch.Tensor]]:
    """Returns the loss and the gradients of one process; without a recipe, without float8."""
    (found,) = run_on_ranks(one_step, 1, job_of(recipe))
    return found


@pytest.mark.parametrize("recipe", tiered(["rowwise"], slow=["rowwise_with_gw_hp", "tensorwise"]))
def test_float8_rounds_within_bounds(recipe: str):
    loss, exact = one_rank(None)
    ours, grads = one_rank(recipe)
    assert loss != ours and abs(ours - loss) < 1e-2 * loss
    assert 0.01 < largest_error(grads, exact) < 0.4


@pytest.mark.parametrize("axis", tiered(["dp_shard"], slow=["dp_replicate"]))
def test_data_parallel_layouts_have_the_same_bits(axis: str):
    loss, grads = one_rank("rowwise")
    for ours, found in run_on_ranks(one_step, 2, job_of("rowwise", f"{axis}=2")):
        assert ours == loss
        assert all(torch.equal(found[name], grads[name]) for name in grads)


def whole(layout: str, planted: bool = False):
    """The loss and the gradients of all ranks' parameters together."""
    ranks = run_on_ranks(one_step, parse(layout).world_size, job_of("rowwise", layout), planted)
    return ranks[0][0], {name: grad for _, part in ranks for name, grad in part.items()}


LAYOUTS = ["dp_shard=2,ep=2", "tp=2", "dp_shard=2,etp=2", "cp=2", "pp=2,tp=2,ep=2"]


@pytest.mark.parametrize("layout", split(LAYOUTS, ["tp=2"]))
def test_other_layouts_round_no_worse(layout: str):
    """Ranks that cut a sum have scales of their own for their parts of it."""
    expected, exact = one_rank(None)
    alone = largest_error(one_rank("rowwise")[1], exact)
    loss, found = whole(layout)
    assert abs(loss - expected) < 1e-2 * expected
    assert found.keys() == exact.keys()
    assert 0.5 * alone < largest_error(found, exact) < 1.3 * alone


def test_cut_linears_that_multiply_exactly_are_seen():
    _, exact = one_rank(None)
    assert largest_error(whole("tp=2", planted=True)[1], exact) < 1e-4


def _printed(job: JobConfig) -> str:
    return str(tiny_step(job, tiny(job))[0].parts[0])


def test_a_printed_model_shows_recipes_under_tensor_parallelism():
    for text in run_on_ranks(_printed, 2, job_of("rowwise_with_gw_hp", "tp=2")):
        assert "ColumnParallelLinear(Float8Linear(rowwise_with_gw_hp))" in text
        assert "ExpertOutputs(silu, grouped_mm)" in text
