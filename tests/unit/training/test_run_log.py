"""Phases with a made-up clock, rates against values computed by hand, memory after an
allocation."""

import json
import mmap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from titan_moe.comm.process import Process
from titan_moe.config.job_config import Job, JobConfig, Training
from titan_moe.config.parse import as_toml
from titan_moe.data.loader import Identity
from titan_moe.metrics.jsonl import PREDICTED
from titan_moe.models.hf import model_of_job
from titan_moe.parallelize.memory import GIB
from titan_moe.parallelize.policies import make_plan
from titan_moe.planner.load import BALANCED
from titan_moe.planner.step_time import step_time
from titan_moe.runtime.gpus import GPUS, Device
from titan_moe.training import run_log
from titan_moe.training.run_log import Phases, RunLog, describe_run, memory_metrics, throughput
from titan_moe.training.train_step import StepResult


def test_phases_add_up_until_taken():
    ticks = iter([0.0, 2.0, 10.0, 10.5, 20.0, 23.0, 30.0, 31.0])
    phases = Phases(clock=lambda: next(ticks))
    with phases("data"):
        pass
    with phases("forward"):
        pass
    with phases("data"):
        pass
    assert phases.take() == {"time/data": 5.0, "time/forward": 0.5}
    with phases("data"):
        pass
    assert phases.take() == {"time/data": 1.0}
    assert phases.take() == {}


def test_throughput_per_job_and_device():
    rates = throughput(6000, 1.5, devices=4, flops_per_token=2e9, peak=1e13)
    assert rates == pytest.approx(
        {
            "tokens_per_second": 4000,
            "tokens_per_second_per_device": 1000,
            "tflops_per_device": 2.0,
            "mfu": 0.2,
        }
    )


def test_resident_memory_follows_an_allocation():
    before = memory_metrics(torch.device("cpu"))
    # No tensor: the C library may have as much free memory that is resident already.
    block = mmap.mmap(-1, 2**28)
    for _ in range(2**8):
        block.write(bytes(2**20))
    during = memory_metrics(torch.device("cpu"))
    assert 0.2 < during["memory/resident_gib"] - before["memory/resident_gib"] < 0.3
    assert during["memory/peak_gib"] >= during["memory/resident_gib"] * 0.99
    block.close()
    after = memory_metrics(torch.device("cpu"))
    assert after["memory/resident_gib"] < during["memory/resident_gib"] - 0.2
    assert after["memory/peak_gib"] >= during["memory/peak_gib"]


def test_describe_run_keeps_an_earlier_configuration(tmp_path):
    """A configuration that is the same as before is not kept twice."""
    process = Process(device=torch.device("cpu"))
    data = Identity("", "", "", True, False, False, 0, 8, 64, "")
    jobs = [
        JobConfig(job=Job(dump_folder=str(tmp_path)), training=Training(steps=steps))
        for steps in (10, 10, 20, 30)
    ]
    for job in jobs:
        describe_run(job, process, data)
    kept = {path.name: path.read_text() for path in tmp_path.glob("*config*")}
    names = ("config.1.toml", "config.2.toml", "config.toml")
    assert kept == dict(zip(names, map(as_toml, jobs[1:]), strict=True))


def test_memory_above_the_estimate_is_a_warning_once(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    estimate = SimpleNamespace(total=6 * GIB, skew=GIB, needed=10 * GIB)
    for over in ({"memory/peak_gib": 7.1}, {"memory/used_gib": 10.1}):
        log = SimpleNamespace(_estimate=estimate, _is_over=False, _first_step=1)
        fits = {"memory/peak_gib": 7.0, "memory/reserved_gib": 8.0, "memory/used_gib": 10.0}
        for step, values in enumerate((fits, fits, fits | over, fits | over), start=1):
            RunLog._compare_memory(log, step, values)  # type: ignore[arg-type]
        levels = [record.levelname for record in caplog.records]
        assert levels == ["INFO", "WARNING"] and "step 3 takes more" in caplog.messages[1]
        caplog.clear()


@pytest.mark.parametrize("gpu", [GPUS["H100"], None])
def test_steps_are_laid_beside_the_estimate_of_a_known_gpu(
    tmp_path: Path,
    gpu: Device | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first logged step and the third one are compared, with the load that they counted; a
    checkpoint's seconds are no step's."""
    caplog.set_level("INFO")
    keys = {"model": {"name": "qwen3", "flavor": "30B-A3B"}, "metrics": {"log_freq": 2}}
    keys |= {"training": {"global_batch_size": 4}, "parallelism": {"expert_parallel_degree": 4}}
    job = JobConfig.model_validate(keys | {"job": {"dump_folder": str(tmp_path)}})
    plan = make_plan(job, model_of_job(job.model), 4, device_type="cuda", device_bytes=None)
    process = Process(world_size=4, local_world_size=4, device=torch.device("cpu"))
    layers = [f"layers.{layer}" for layer in range(48)]
    sharded = SimpleNamespace(plan=plan, device=process.device, all_moe_layers=lambda: layers)
    even_LE = torch.full((48, 128), 1024)
    uneven_LE = even_LE * torch.tensor([3, 1, 0, 0]).repeat_interleave(32)
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(run_log.time, "perf_counter", lambda: now.s)
    monkeypatch.setattr(run_log, "known_gpu", lambda _: gpu)
    log = RunLog(job, sharded, process, resume_step=0)  # type: ignore[arg-type]
    log.phases = Phases(clock=lambda: now.s)
    for step in range(1, 9):
        now.s += 2.0
        with log.phases("checkpoint"):
            now.s += 100.0
        counts_LE = uneven_LE if step == 4 else even_LE
        result = StepResult(1.0, 1.0, 1, counts_LE, metrics={"data": 1})
        log.step(step, result, rates={"": 1.0}, tokens=1, step_tokens=1, validation_loss=None)
    lines = [line for line in caplog.messages if "predicted" in line]
    steps = [json.loads(each) for each in (tmp_path / "metrics.jsonl").open()]
    said = {each["step"]: each for each in steps if PREDICTED + "products" in each}
    assert len(lines) == len(said) == (0 if gpu is None else 2)
    if gpu is not None:
        for region, seconds in step_time(plan, gpu, BALANCED).items():
            assert said[1][PREDICTED + region] == pytest.approx(seconds, rel=1e-6)
        assert said[4][PREDICTED + "experts"] > 2.5 * said[1][PREDICTED + "experts"]
        total = sum(value for key, value in said[4].items() if key.startswith(PREDICTED))
        line = f"step 4, settled: {50 * total:.0f} % of this layout's bound: 2.00 s a step, "
        assert lines[0].startswith("step 1, the first one: ") and lines[1].startswith(line)
        assert lines[1].endswith(f"most of it experts {said[4][PREDICTED + 'experts']:.2f} s")
