"""Routings recorded in one layout are followed in any other, token by token."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.paths import DEBUG_CONFIGS
from tests.support.tiers import tiered
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import load_job
from titan_moe.debug.routing_trace import (
    FLIPS_FILE,
    Record,
    RowName,
    Tokens,
)
from titan_moe.metrics.jsonl import read_json_lines
from titan_moe.models.config import ModelConfig
from titan_moe.models.hf import model_of_job
from titan_moe.runtime.ranks import RankError, run_on_ranks
from titan_moe.verify.gradients.fixture import at_depth, make_rows
from titan_moe.verify.gradients.reference import Rows
from titan_moe.verify.layouts.layouts import SEQ_LEN, apply_layout, parse, with_tables

ROWS, STEPS, LAYERS = 16, 2, 4
LAST = "mtp.layers.0"


class Steps(NamedTuple):
    """Measurements of a training."""

    losses: list[float]
    counts_SLE: list[list[list[int]]]


def job_of(layout: str, **tables: dict) -> JobConfig:
    """The gate's job in a layout."""
    job = load_job(["--job.config_file", str(DEBUG_CONFIGS / "gate_deepseek_v3.toml")])
    every = {
        "training": {"global_batch_size": ROWS, "steps": STEPS},
        "parallelism": {"module_fqns_per_model_part": None},
    }
    return with_tables(apply_layout(job, parse(layout), every), tables)


def model_of(job: JobConfig) -> ModelConfig:
    return at_depth(model_of_job(job.model), LAYERS)


def rows_of(step: int, vocab_size: int, order: int) -> Rows:
    """Among them the same row three times: on one data rank of two twice, once on the other."""
    rows = make_rows(ROWS, SEQ_LEN, vocab_size, seed=step)
    place_B = np.arange(ROWS)
    place_B[[5, 13]] = 2
    if order:
        place_B = np.random.default_rng(order).permutation(place_B)
    return Rows(*(x_BS[place_B] for x_BS in (rows.tokens_BS, rows.labels_BS, rows.documents_BS)))


def train(job: JobConfig, noise: float = 0.0, planted: str = "") -> Steps:
    """The job's steps, each followed by an evaluation, which no trace may see."""
    from titan_moe.debug.routing_trace import RoutingTrace
    from titan_moe.distributed.parallelize import build_sharded_model
    from titan_moe.optim.optimizers import build_optimizer
    from titan_moe.runtime.process import Process
    from titan_moe.train_step import TrainStep, local_batch
    from titan_moe.verify.gradients.worker import local, own_batches

    cpu, rank, world_size = torch.device("cpu"), dist.get_rank(), dist.get_world_size()
    sharded = build_sharded_model(job, model_of(job), device=cpu, world_size=world_size)
    generator = torch.Generator().manual_seed(7)
    for moe in sharded.moe_layers().values():
        weight = local(moe.router.gate.weight.data)
        weight += noise * torch.randn(weight.shape, generator=generator)
    optimizer = build_optimizer(job.optimizer, sharded.named_parameters())
    step_fn = TrainStep(sharded, optimizer, job.training, device=cpu)
    process = Process(rank=rank, world_size=world_size, device=cpu)
    routing = RoutingTrace(job, sharded, process, resume_step=0)
    if planted == "positions of other tokens":
        routing._tokens = partial(shifted, routing._tokens)
    dims = sharded.meshes.dims
    data_ranks, place = dims.size("batch"), dims.coordinate(rank, "batch")
    losses, counts = [], []
    for step in range(1, job.training.steps + 1):
        seed = step + 100 if planted == "other data" else step
        rows = rows_of(seed, sharded.config.vocab_size, job.debug.permute_rows)
        batches = own_batches(rows, job.training.local_batch_size, place, data_ranks)
        with routing.step(step, batches):
            result = step_fn(batches)
        losses.append(result.loss)
        assert result.counts_LE is not None
        counts.append(result.counts_LE.tolist())
        sharded.train(False)
        sharded.execution.evaluate(local_batch(batches[0], sharded, cpu))
        sharded.train(True)
    return Steps(losses, counts)


def shifted(tokens: Callable[[Any], Tokens], batches: Any) -> Tokens:
    rows, positions = tokens(batches)
    return Tokens(rows, np.roll(positions, 1))


def run(folder: Path, layout: str, *args: object, replay: Path | None = None, order: int = 0):
    """Train in `folder`, record to its `record`, and maybe follow another record."""
    debug = {"routing_record": str(folder / "record"), "permute_rows": order}
    if replay is not None:
        debug["routing_replay"] = str(replay)
    job = job_of(layout, job={"dump_folder": str(folder)}, debug=debug)
    return run_on_ranks(train, parse(layout).world_size, job, *args)[0]


def own_choices(folder: Path) -> np.ndarray:
    """Slots that the run's own router would have chosen otherwise, by step and layer, [S, L]."""
    lines = read_json_lines(folder / FLIPS_FILE)
    return np.array([list(line["flips"].values()) for line in lines])


class Recorded(NamedTuple):
    record: Path
    steps: Steps


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> Recorded:
    folder = tmp_path_factory.mktemp("one")
    return Recorded(folder / "record", run(folder, "dp_shard=1"))


def table(path: Path, step: int, layer: str) -> dict[tuple[RowName, int], tuple]:
    """(row, position) -> its experts, in their order."""
    found = {}
    for part in Record(path).steps[step]:
        if layer in part.layers:
            rows, positions = part.tokens
            experts_RPK = part.read(layer).tolist()
            for row, experts_PK in zip(rows, experts_RPK, strict=True):
                for position, experts in zip(positions.tolist(), experts_PK, strict=True):
                    assert (row, position) not in found, "recorded twice"
                    found[row, position] = tuple(experts)
    return found


CASES = tiered(
    [("dp_shard=1", 3), ("tp=2,ep=2", 0)],
    slow=[("cp=2,recompute=op", 0), ("pp=2,schedule=ZBVZeroBubble", 0)],
    full=[
        ("dp_shard=2,ep=2,recompute=full", 0),
        ("pp=2,tp=2,schedule=DualPipeV", 0),
        ("dp_replicate=2,cp=2,tp=2,ep=2,etp=2", 5),
    ],
)


@pytest.mark.parametrize(("layout", "order"), CASES)
def test_record_is_followed_in_any_layout(
    tmp_path: Path, one_process: Recorded, layout: str, order: int
):
    steps = run(tmp_path, layout, replay=one_process.record, order=order)
    assert steps.losses == pytest.approx(one_process.steps.losses, rel=1e-12)
    assert steps.counts_SLE == one_process.steps.counts_SLE
    assert own_choices(tmp_path).tolist() == [[0] * LAYERS] * 2
    layers = Record(one_process.record).dims.layers
    assert layers[-1] == LAST
    for step in (1, 2):
        for layer in layers:
            expected = table(one_process.record, step, layer)
            assert len(expected) == ROWS * SEQ_LEN
            assert table(tmp_path / "record", step, layer) == expected


def test_wrong_tokens_change_the_routing(tmp_path: Path, one_process: Recorded):
    steps = run(tmp_path, "dp_shard=1", 0.0, "positions of other tokens", replay=one_process.record)
    assert (own_choices(tmp_path)[0] > 50).all()
    assert steps.losses != pytest.approx(one_process.steps.losses, rel=1e-6)


def test_replay_binds_a_disturbed_router(tmp_path: Path, one_process: Recorded):
    run(tmp_path, "dp_shard=2", 1e-2, replay=one_process.record)
    assert table(tmp_path / "record", 1, LAST) == table(one_process.record, 1, LAST)
    assert own_choices(tmp_path)[0].sum() > 0, "the router itself would have chosen otherwise"


def test_record_of_other_data_is_refused(tmp_path: Path, one_process: Recorded):
    with pytest.raises(RankError, match=r"step 1 of .* has no routing of layers.1 for the row"):
        run(tmp_path, "dp_shard=1", 0.0, "other data", replay=one_process.record)
