"""The microbatches of a step share collectives and sums in float32, and an evaluation between two
steps changes nothing."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.operations import Operations
from tests.support.tiers import tiered
from tests.support.tiny import FirstGradients, batch_of, make_job, tiny_step
from titan_moe.checkpoint.tensors import model_tensors
from titan_moe.config.job_config import JobConfig
from titan_moe.data.batch import Batch
from titan_moe.distributed.dtensor import local_part
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.simulate.comm_counter import CommCounter, axes_of_groups
from titan_moe.training.train_step import validation_loss

MICROBATCHES = 3
CPU = torch.device("cpu")


def job_with(word: str, replicas: int = 1, ep: int = 1, **training: Any) -> JobConfig:
    degrees = {"data_parallel_replicate_degree": replicas, "expert_parallel_degree": ep}
    parallelism = {"fsdp_accumulation": word, **degrees}
    return make_job("qwen3", parallelism=parallelism, training=training)


def batches(first: int) -> list[Batch]:
    """A step's microbatches, of this rank's own sequences."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = slice(rank, 2 * ranks, ranks)
    return [batch_of(first + number, rows) for number in range(MICROBATCHES)]


def trained(job: JobConfig, evaluates: bool = False) -> dict[str, Any]:
    """Two steps: the calls of the second, losses, and the gradients of the first."""
    sharded, step = tiny_step(job)
    parameters = dict(sharded.named_parameters())
    seen = FirstGradients(sharded, local_part)
    losses, counter = [], CommCounter()
    with counter:
        for number in range(2):
            counter.groups = axes_of_groups(sharded.meshes)
            counter.clear()
            data = batches(MICROBATCHES * number)
            losses.append(step(data, observer=seen).loss)
            calls = Counter({f: v.calls for f, v in counter.volumes().items() if v.bytes})
            counter.groups = {}
            if evaluates:
                losses.append(validation_loss(data, sharded)[0])
                kept = model_tensors(sharded.parts)
                shapes = {name: local_part(kept[f"model.{name}"]).shape for name in parameters}
                assert shapes == {name: local_part(p).shape for name, p in parameters.items()}
    return {"calls": calls, "losses": losses, "gradients": seen.found}


# --- collectives ---

# The embedding, three blocks, the output layer, and the norm, which is the root's. The last two are
# not freed between their forward and their backward.
UNITS, FREED = 6, 4


@pytest.mark.parametrize(
    "word, gathers, reductions",
    [
        ("reduce_each", MICROBATCHES * (UNITS + FREED), MICROBATCHES * UNITS),
        ("keep_gathered", UNITS, UNITS),
    ],
)
def test_units_are_gathered_and_reduced_as_often_as_the_word_says(
    word: str, gathers: int, reductions: int
):
    for found in run_on_ranks(trained, 2, job_with(word)):
        by_op: Counter[str] = Counter()
        for flow, calls in found["calls"].items():
            by_op[flow.op] += calls
        assert (by_op["all_gather"], by_op["reduce_scatter"]) == (gathers, reductions)


@pytest.mark.parametrize(
    "word, sums", tiered([("keep_gathered", UNITS)], slow=[("reduce_each", MICROBATCHES * UNITS)])
)
def test_replicas_are_summed_once(word: str, sums: int):
    for found in run_on_ranks(trained, 4, job_with(word, replicas=2)):
        over_replicas = {
            flow.op: calls
            for flow, calls in found["calls"].items()
            if "dp_replicate" in flow.axis.split("+")
        }
        assert over_replicas == {"all_reduce": sums}


def reductions(word: str) -> tuple[int, int, dict[str, Any]]:
    """Two steps, with experts on one rank each in three layers, in bfloat16: how often FSDP
    reduces, over one rank too; all casts; and the gradients."""
    degrees = {"expert_parallel_degree": 2, "fsdp_accumulation": word}
    mixed = {"dtype": "float32", "mixed_precision_param": "bfloat16"}
    with Operations() as seen:
        found = trained(make_job("qwen3", parallelism=degrees, training=mixed))
    return seen.calls["fsdp.chunk_cat"], seen.calls["aten._to_copy"], found["gradients"]


def test_experts_of_one_rank_add_up_without_a_reduction_in_each_microbatch():
    each, once = (run_on_ranks(reductions, 2, word) for word in ("reduce_each", "keep_gathered"))
    for (calls, _, ours), (fewest, _, theirs) in zip(each, once, strict=True):
        assert (calls, fewest) == (2 * (MICROBATCHES * UNITS + 3), 2 * (UNITS + 3))
        experts = [name for name in ours if ".experts." in name]
        assert experts and all(torch.equal(ours[name], theirs[name]) for name in experts)


def test_experts_of_one_rank_are_cast_once_a_step_where_they_stay_gathered():
    each, kept = (run_on_ranks(reductions, 2, word) for word in ("reduce_each", "keep_unsharded"))
    for (calls, casts, ours), (same, fewer, theirs) in zip(each, kept, strict=True):
        # Of two steps, three weights in each of three layers: forward and backward, or once.
        assert casts - fewer == 2 * 3 * 3 * (2 * MICROBATCHES - 1)
        assert calls == same and ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# --- numbers ---


def error(ours: dict, theirs: dict) -> float:
    """Returns the relative error of all gradients together."""
    parts = [(ours[name].double() - theirs[name].double()).square().sum() for name in theirs]
    whole = [theirs[name].double().square().sum() for name in theirs]
    return float((sum(parts) / sum(whole)).sqrt())


def mixed_gradients(word: str) -> dict[str, torch.Tensor]:
    job = job_with(word, dtype="float32", mixed_precision_param="bfloat16")
    return run_on_ranks(trained, 2, job)[0]["gradients"]


def test_gradients_in_bfloat16_add_up_in_float32():
    """The sum is right to a few units of float32, each gradient only to units of bfloat16."""
    exact = run_on_ranks(trained, 2, job_with("reduce_each"))[0]["gradients"]
    ours, each = mixed_gradients("keep_gathered"), mixed_gradients("reduce_each")
    assert all(gradient.dtype == torch.float32 for gradient in ours.values())
    assert error(ours, each) < 1e-6
    assert 1e-3 < error(ours, exact) < 1.001 * error(each, exact)


@pytest.mark.parametrize("word", tiered(["keep_gathered", "keep_unsharded"], slow=["reduce_each"]))
def test_an_evaluation_between_two_steps_changes_nothing(word: str):
    """A checkpoint finds sharded parameters then, though an evaluation frees none."""
    job = job_with(word, ep=1 + (word == "keep_unsharded"))
    plain = run_on_ranks(trained, 2, job, False)[0]["losses"]
    with_evaluation = run_on_ranks(trained, 2, job, True)[0]["losses"]
    assert with_evaluation[0::2] == plain
    # The weights of the second step's data were updated before the second evaluation.
    assert with_evaluation[3] < with_evaluation[2]
