"""Training of adapters: what is saved, and runs that go on."""

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.support.refusals import refusal
from tests.support.tiers import tiered
from tests.support.trainings import assert_same_run, figures, make_job, process_here, train_here
from titan_moe.checkpoint.manifest import read_manifest
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import save_job
from titan_moe.models.decoder import ADAPTER
from titan_moe.models.hf import model_of_job
from titan_moe.prepare.job import check_all
from titan_moe.runtime.ranks import RankError, run_on_ranks
from titan_moe.training.trainer import train

STEPS = 4
SEED = {"enable": True, "create_seed_checkpoint": True}


def job_of(folder: Path, base: Path, *, steps: int = STEPS, **tables) -> JobConfig:
    """A job that trains adapters of the base, or the base itself."""
    tables = {
        "checkpoint": {"enable": True, "interval": 2, "initial_load_path": str(base)},
        "lora": {"rank": 3},
        "parallelism": {"expert_parallel_degree": 2},
        **tables,
    }
    return make_job(folder, steps=steps, **tables)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    run_on_ranks(train_here, 1, make_job(folder, steps=1))
    return folder / "checkpoint/step-1"


@pytest.fixture(scope="module")
def adapted(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapted")
    run_on_ranks(train_here, 2, job_of(folder, base))
    return folder


def test_a_checkpoint_holds_adapters_their_moments_and_the_routers_state(adapted: Path):
    manifest = read_manifest(adapted / "checkpoint/step-4")
    assert manifest.base
    others = [name for name in manifest.tensors if ".adapter." not in name]
    assert others and all(".router." in name and ".gate." not in name for name in others)
    moments = [name for name in manifest.tensors if name.endswith("exp_avg")]
    parameters = [
        name for name in manifest.tensors if name.startswith("model.") and "adapt" in name
    ]
    assert len(moments) == len(parameters) > 0


@pytest.mark.parametrize("dtype", tiered(["float32"], slow=["bfloat16"]))
def test_a_run_of_adapters_that_stops_goes_on_as_the_same_run(
    tmp_path: Path, base: Path, adapted: Path, dtype: str
):
    whole = adapted
    if dtype != "float32":
        whole = tmp_path / "whole"
        run_on_ranks(train_here, 2, job_of(whole, base, dtype=dtype))
    halves = tmp_path / "halves"
    run_on_ranks(train_here, 2, job_of(halves, base, steps=2, dtype=dtype))
    run_on_ranks(partial(train_here, disturb=True), 2, job_of(halves, base, dtype=dtype))
    assert_same_run(halves, whole, STEPS)


@pytest.mark.slow
def test_a_stage_without_adapters_saves_no_weights(tmp_path: Path, base: Path):
    tables = {"lora": {"rank": 3, "targets": ["layers.0"]}}
    tables["parallelism"] = {"pipeline_parallel_degree": 2}
    for steps in (2, 3):
        run_on_ranks(train_here, 2, job_of(tmp_path, base, steps=steps, **tables))
    tensors = read_manifest(tmp_path / "checkpoint/step-3").tensors
    assert not [name for name in tensors if name.endswith("weight") and ADAPTER not in name]


def test_adapters_go_on_in_another_layout(tmp_path: Path, base: Path, adapted: Path):
    shutil.copytree(adapted, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoint/step-4")
    tables = {"parallelism": {"tensor_parallel_degree": 2, "expert_tensor_parallel_degree": 2}}
    run_on_ranks(train_here, 2, job_of(tmp_path / "run", base, **tables))
    lines = zip(figures(tmp_path / "run")[-2:], figures(adapted)[-2:], strict=True)
    for ours, theirs in lines:
        assert ours[:1] == theirs[:1]
        assert ours[1:] == pytest.approx(theirs[1:], rel=1e-5)


REFUSED = {
    "lora.rank is 4, and": {"lora": {"rank": 4}},
    "has adapters of lora.alpha=32.0: set it to that": {"lora": {"rank": 3, "alpha": 2.0}},
    "lora.targets is ['experts'], and": {"lora": {"rank": 3, "targets": ["experts"]}},
    "lora.rank is not set, and": {"lora": {}},
}


@pytest.mark.parametrize("says", REFUSED)
def test_other_adapters_are_refused_before_any_rank_starts(
    tmp_path: Path, base: Path, adapted: Path, says: str
):
    assert says in refused(tmp_path, job_of(adapted, base, steps=6, **REFUSED[says]))


def test_a_model_and_adapters_are_not_taken_for_each_other(
    tmp_path: Path, base: Path, adapted: Path
):
    adapters = adapted / "checkpoint/step-4"
    for lora in ({}, {"rank": 3}):
        says = refused(tmp_path, job_of(tmp_path / "new", adapters, lora=lora))
        assert "holds adapters, and no model: titan-moe hf merge" in says
    says = refused(tmp_path, job_of(base.parents[1], base))
    assert "holds a whole model: name it in checkpoint.initial_load_path" in says


@pytest.mark.slow
def test_adapters_saved_without_their_moments_begin_another_run(tmp_path: Path, base: Path):
    saves = {"enable": True, "initial_load_path": str(base), "last_save_model_only": True}
    run_on_ranks(train_here, 2, job_of(tmp_path / "run", base, steps=1, checkpoint=saves))
    says = refused(tmp_path, job_of(tmp_path / "run", base, steps=2))
    assert "what titan-moe hf export makes of it as lora.initial_load_path" in says


def refused(folder: Path, job: JobConfig) -> str:
    """Returns the line by which a job is refused."""
    save_job(job, folder / "job.toml")
    return refusal(check_all, ["--config", str(folder / "job.toml")], 2, 1, {})


def test_adapters_of_other_weights_are_refused(tmp_path: Path, base: Path, adapted: Path):
    shutil.copytree(adapted, tmp_path / "run")
    run_on_ranks(train_here, 1, make_job(tmp_path / "other", steps=1, debug={"seed": 9}))
    other = tmp_path / "other/checkpoint/step-1"
    with pytest.raises(RankError, match="has adapters of other weights than those that were loa"):
        run_on_ranks(train_here, 2, job_of(tmp_path / "run", other, steps=6))


def write_seed(job: JobConfig) -> None:
    train(job, model_of_job(job.model), process_here())


@pytest.mark.slow
def test_a_seed_checkpoint_holds_weights_and_adapters(tmp_path: Path):
    seed = make_job(tmp_path, lora={"rank": 3}, checkpoint=SEED)
    run_on_ranks(write_seed, 1, seed)
    path = tmp_path / "checkpoint/step-0"
    assert {ADAPTER in name for name in read_manifest(path).tensors} == {True, False}
    curves = []
    for layout in ({}, {"tensor_parallel_degree": 2}):
        folder = tmp_path / f"run-{len(curves)}"
        run_on_ranks(train_here, 2, job_of(folder, path, parallelism=layout, steps=2))
        curves.append(np.array([line[1:3] for line in figures(folder)]))
    np.testing.assert_allclose(*curves, rtol=1e-5)
    says = refused(tmp_path, job_of(tmp_path / "other", path, lora={"rank": 3, "alpha": 1.0}))
    assert "lora.alpha is 1.0, and" in says and "another checkpoint.initial_load_path" in says
