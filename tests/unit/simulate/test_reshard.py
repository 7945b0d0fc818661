"""A move between layouts by arithmetic, against a count of elements and what is really laid out."""

import json
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.commands import run_command
from tests.support.pictures import assert_drawn
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import load_job
from titan_moe.distributed.boxes import Box
from titan_moe.distributed.dtensor import local_slices
from titan_moe.distributed.parallelize import build_sharded_model
from titan_moe.distributed.sharding_moves import Link
from titan_moe.models.hf import model_of_job
from titan_moe.runtime.process_pool import in_fresh_processes
from titan_moe.simulate.fake_rank import CPU, fake_world
from titan_moe.simulate.reshard import Holding, LinkTraffic, Machine, Reshard, holdings, reshard
from titan_moe.verify.layouts.layouts import parse

GATE = "configs/debug/gate_deepseek_v3.toml"
MACHINE = Machine(2, Link(1e9, 1e-5), Link(1e8, 1e-4))
MOVES = [
    ("dp_shard=4", "dp_shard=2,tp=2,ep=2"),
    ("pp=2,dp_shard=2", "dp_replicate=2,dp_shard=2,ep=2"),
    ("dp_shard=2,cp=2,ep=4", "dp_shard=2,tp=2,ep=2,etp=2"),
]


def job_of(*overrides: str) -> JobConfig:
    return load_job(["--job.config_file", GATE, *overrides])


def moved(source: str, target: str, machine: Machine = MACHINE, *overrides: str) -> Reshard:
    job = job_of(*overrides)
    return reshard(job, model_of_job(job.model), source, target, machine)


def elements(holding: Holding, name: str) -> np.ndarray:
    """Which elements of a tensor a rank has."""
    whole = np.zeros(holding[name].shape, bool)
    whole[holding[name].box] = True
    return whole


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_each_rank_gets_the_elements_that_it_lacks(source: str, target: str) -> None:
    job = job_of()
    config = model_of_job(job.model)
    before, after = holdings(job, config, source), holdings(job, config, target)
    missing = []
    for old, new in zip(before, after, strict=True):
        lacking = 0
        for name, held in new.items():
            wanted = elements(new, name)
            if name in old:
                wanted &= ~elements(old, name)
            lacking += int(wanted.sum()) * held.dtype.itemsize
        missing.append(lacking)
    found = moved(source, target)
    assert found.bytes.sum(axis=0).tolist() == missing
    assert found.fewest_bytes == sum(missing) > 0
    assert found.inside.total + found.between.total == sum(missing)
    assert found.inside.total == sum(found.bytes[a, b] for a, b in ((0, 1), (1, 0), (2, 3), (3, 2)))
    assert found.between.most_received == max(
        found.bytes[2:, :2].sum(axis=0).max(), found.bytes[:2, 2:].sum(axis=0).max()
    )
    parts = [sum(prod(e.shape) * 8 for e in _once(each).values()) for each in (before, after)]
    assert parts == [found.state_bytes] * 2


def _once(ranks: list[Holding]) -> Holding:
    return {name: held for rank in ranks for name, held in rank.items()}


def laid_out(job: JobConfig, world_size: int, rank: int) -> dict[str, tuple[torch.Size, Box]]:
    torch.set_num_threads(1)
    with fake_world(rank, world_size):
        config = model_of_job(job.model)
        model = build_sharded_model(
            job, config, device=CPU, world_size=world_size, draw_weights=False
        )
        return {name: (p.shape, local_slices(p)) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("degrees", "layout", "rank"),
    [
        (
            {"pipeline": 2, "data_parallel_shard": 2, "tensor": 2, "expert": 2},
            "pp=2,dp_shard=2,tp=2,ep=2",
            5,
        ),
        (
            {"data_parallel_shard": 2, "context": 2, "expert": 2, "expert_tensor": 2},
            "dp_shard=2,cp=2,ep=2,etp=2",
            1,
        ),
    ],
)
def test_holdings_are_what_is_laid_out(degrees: dict[str, int], layout: str, rank: int) -> None:
    words = []
    for name, degree in degrees.items():
        key = name if name.startswith("data") else f"{name}_parallel"
        words += [f"--parallelism.{key}_degree", str(degree)]
    job, world_size = job_of(*words), parse(layout).world_size
    ((_, real),) = in_fresh_processes(laid_out, [(job, world_size, rank)], num_workers=1)
    held = holdings(job_of(), model_of_job(job.model), layout)[rank]
    assert {name.partition(" ")[0] for name in held} == set(real)
    for name, (shape, box) in real.items():
        for kind in ("parameter", "exp_avg", "exp_avg_sq"):
            found = held[f"{name} {kind}"]
            assert (found.shape, found.box) == (tuple(shape), box), name


def test_figures_of_a_small_move() -> None:
    """Written down once: a change of these is a change of who holds or who sends what."""
    few, many = 179_352, 1_640_448
    assert moved(*MOVES[0]).as_json() == {
        "source": MOVES[0][0],
        "target": MOVES[0][1],
        "bytes": [[0, few, 0, 0], [few, 0, many, 0], [0, many, 0, few], [0, 0, few, 0]],
        "fewest_bytes": 3_998_304,
        "state_bytes": 7_610_976,
        "inside": LinkTraffic(4 * few, few, few, few)._asdict(),
        "between": LinkTraffic(2 * many, many, many, many)._asdict(),
        "calls": 2,
        "seconds": pytest.approx(2e-4 + many / 1e8),
        "before_bytes": 1_902_744,
        "after_bytes": 1_999_152,
        "peak_bytes": 5_694_048,
    }


def test_time_is_of_the_slowest_rank_s_slower_links() -> None:
    near, far = moved(*MOVES[0]), moved(*MOVES[0], MACHINE._replace(ranks_per_node=4))
    assert near.calls == far.calls == 2  # Parameters, then moments.
    sent, received = near.between.most_sent, near.between.most_received
    assert near.seconds == pytest.approx(2e-4 + max(sent, received) / 1e8)
    assert far.between.total == 0
    most = max(far.inside.most_sent, far.inside.most_received)
    assert far.seconds == pytest.approx(2e-5 + most / 1e9)
    assert moved("dp_shard=4,ep=2", "dp_shard=4,ep=2").seconds == 0


def test_moments_move_when_the_old_parameters_are_free() -> None:
    stays = moved("dp_shard=4,ep=2", "dp_shard=4,ep=2")
    assert stays.before_bytes == stays.after_bytes
    assert stays.peak_bytes == pytest.approx(5 / 3 * stays.before_bytes)


def test_muon_keeps_one_moment_of_a_matrix() -> None:
    adam = moved(*MOVES[0]).state_bytes
    muon = moved(*MOVES[0], MACHINE, "--optimizer.name", "Muon").state_bytes
    narrow = moved(*MOVES[0], MACHINE, "--optimizer.state_dtype", "bfloat16").state_bytes
    assert 2 / 3 * adam < muon < adam
    assert narrow == adam / 3 + adam * 2 / 3 / 4


@pytest.mark.parametrize(
    ("source", "target", "says"),
    [
        ("dp_shard=4", "dp_shard=8", "--from dp_shard=4 has 4 ranks and --to dp_shard=8 8: "),
        ("dp_shard=4", "dp_shard=4,ep=3", "ep 3 x etp 1 must divide dp_shard 4"),
        ("dp_shard=16", "tp=16", "tp=16: parallelism.tensor_parallel_degree=16 must divide"),
        ("dp_shard=4", "dp=4", "'dp' is unknown"),
    ],
)
def test_a_move_that_cannot_be_is_refused(source: str, target: str, says: str) -> None:
    answer = run_command("simulate", "reshard", "--config", GATE, "--from", source, "--to", target)
    assert answer.returncode == 2
    assert says in answer.stderr.splitlines()[0], answer.stderr


def test_the_command_writes_figures_and_a_picture(tmp_path: Path) -> None:
    words = ["simulate", "reshard", "--config", GATE, "--from", MOVES[0][0], "--to", MOVES[0][1]]
    answer = run_command(*words, "--ranks-per-node", 2, "--out", tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert "4 ranks, 2 on a node: " in answer.stdout and "GB/s inside and 50 GB/s" in answer.stdout
    figures = json.loads((tmp_path / "reshard.json").read_text())
    assert np.sum(figures["bytes"]) == figures["fewest_bytes"]
    assert_drawn(tmp_path / "reshard.png")
    assert json.loads(run_command(*words, "--json").stdout)["calls"] == 2
