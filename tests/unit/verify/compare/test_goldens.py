"""Golden files: written with a reason, found by torch and capability, and read as they were."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.stub_runs import COMMON, calls, silent, trial
from tests.support.verdict_cases import controls, run
from titan_moe.config.errors import ConfigError
from titan_moe.runtime.device import describe_device
from titan_moe.verify.compare.goldens import (
    find_golden,
    golden_key,
    is_golden,
    save_golden,
    this_device,
)
from titan_moe.verify.compare.records import Verdict
from titan_moe.verify.compare.run_spec import RunSpec
from titan_moe.verify.compare.runner import compare, update_golden

CONFIG = {
    "job": {"dump_folder": "/somewhere", "description": "tiny"},
    "model": {"name": "qwen3"},
    "checkpoint": {"initial_load_path": "/somewhere"},
}


def save(folder: Path, reason: str = "a first one") -> Path:
    record = replace(run("baseline", world_size=1, **describe_device(this_device())), config=CONFIG)
    return save_golden(folder, record, controls(), reason=reason)


def test_golden_is_read_as_it_was_written(tmp_path: Path):
    save(tmp_path / "qwen3")
    path = save(tmp_path / "qwen3", "the router changed")
    assert path.name == f"{golden_key()}.json" and is_golden(tmp_path / "qwen3")
    golden = find_golden(tmp_path / "qwen3")
    assert [entry["reason"] for entry in golden.history] == ["a first one", "the router changed"]
    record = run("baseline")
    assert golden.run.steps == record.steps
    assert golden.run.data == record.data
    for key in ("loss", "grad_norm"):
        assert (golden.run.scalars[key] == record.scalars[key]).all()
        ours, theirs = golden.controls[3].scalars[key], controls()[3].scalars[key]
        assert (ours == theirs).all()
    assert (golden.run.loads["layers.1"] == record.loads["layers.1"]).all()
    assert len(golden.controls) == len(controls()) and not golden.caveats()
    assert "somewhere" not in path.read_text(), "folders of the machine that made it"
    again = golden.write_config(tmp_path / "golden.toml").read_text()
    assert 'name = "qwen3"' in again and "somewhere" not in again


def test_run_of_another_machine_makes_no_golden(tmp_path: Path):
    record = replace(run("baseline", device="NVIDIA H10", capability="1.0"), config=CONFIG)
    with pytest.raises(ConfigError, match="ran on NVIDIA H10 "):
        save_golden(tmp_path, record, controls(), reason="x")


def test_another_machines_golden_is_refused_in_a_folder_and_a_caveat_by_name(tmp_path: Path):
    path = save(tmp_path / "g")
    other = path.rename(path.with_name("torch-1.0-cpu-ABACUS.json"))
    with pytest.raises(ConfigError, match=r"has no golden for .*, only torch-1\.0-cpu-ABACUS"):
        find_golden(tmp_path / "g")
    (caveat,) = find_golden(other).caveats()
    assert "torch-1.0-cpu-ABACUS" in caveat and golden_key() in caveat


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}'])
def test_file_that_is_no_golden_is_refused(tmp_path: Path, text: str):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError):
        find_golden(tmp_path / "x.json")


def test_a_golden_has_its_own_configuration_and_controls(launcher, tmp_path: Path):
    golden = tmp_path / "goldens" / "tiny"
    with pytest.raises(ConfigError, match="needs --reason"):
        update_golden(trial(), launcher, golden, " ", silent)
    path = update_golden(trial(), launcher, golden, "a first one", silent)
    assert path.parent == golden and len(calls(launcher)) == 10
    no_config = RunSpec(overrides=(("training.steps", "6"),))
    against = trial("", str(golden), no_config)
    assert compare(against, launcher, silent).verdict is Verdict.IDENTICAL
    assert calls(launcher)[-1]["folder"] == "candidate" and len(calls(launcher)) == 11
    wrong = trial("--optimizer.lr 3.1e-3", str(golden), no_config)
    with pytest.raises(ConfigError, match="holds no cost"):
        compare(replace(wrong, max_slowdown=0.1), launcher, silent)
    assert compare(wrong, launcher, silent).verdict is Verdict.DIFFERENT
    with pytest.raises(ConfigError, match="has its own configuration"):
        compare(replace(against, candidate=COMMON), launcher, silent)
    with pytest.raises(ConfigError, match="a golden is a baseline"):
        compare(trial(str(golden), "", no_config), launcher, silent)
