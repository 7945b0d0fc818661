"""Hugging Face folders straight from the configuration, through run_train.sh."""

import json
from pathlib import Path

import pytest
import torch

from tests.support.hf_folders import assert_same_bits, make_folder, read_folder, small_model
from tests.support.jobs import run_train


def _overrides(source: Path, **more):
    return {
        "model__name": "qwen3",
        "model__flavor": "hf",
        "model__hf_assets_path": source,
        "model__tokenizer_path": "bytes",
        "checkpoint__enable": "true",
        "checkpoint__initial_load_in_hf": "true",
        "checkpoint__last_save_in_hf": "true",
        "checkpoint__export_dtype": "bfloat16",
        "optimizer__lr": 0,
        "training__steps": 1,
        **more,
    }


@pytest.fixture
def source(tmp_path):
    make_folder(tmp_path / "in", small_model("qwen3"), torch.bfloat16)
    return tmp_path / "in"


@pytest.mark.slow
def test_a_run_from_a_folder_to_a_folder(source, tmp_path):
    """With a learning rate of 0 the export has the bits of the import, in any layout."""
    settings = json.loads((source / "config.json").read_text()) | {"eos_token_id": None}
    (source / "config.json").write_text(json.dumps(settings))
    layout = {"parallelism__expert_parallel_degree": 2}
    done = run_train(tmp_path / "run", {"NGPU": 2}, **_overrides(source, **layout))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MB/s" in done.stdout
    out = tmp_path / "run/checkpoint/step-1-hf"
    assert_same_bits(read_folder(out), read_folder(source))
    assert not (out / "tokenizer_config.json").exists()  # The run reads bytes.
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 257  # Of bytes.
    # The run's own checkpoint is complete too, and goes on without the folder it began with.
    source.rename(tmp_path / "gone")
    more = _overrides(tmp_path / "gone", training__steps=2, training__local_batch_size=4)
    more["checkpoint__initial_load_path"] = source
    done = run_train(tmp_path / "run", {"NGPU": 1}, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_bits(read_folder(tmp_path / "run/checkpoint/step-2-hf"), read_folder(out))


@pytest.mark.slow
def test_a_folder_in_the_way_is_named_before_training(source, tmp_path):
    taken = tmp_path / "run/checkpoint/step-1-hf"
    taken.mkdir(parents=True)
    done = run_train(tmp_path / "run", {"NGPU": 1}, **_overrides(source))
    assert done.returncode != 0 and "step-1-hf exists" in done.stderr
    assert "step 1" not in done.stdout and not (tmp_path / "run/checkpoint/step-1").exists()
