"""One process: saves, the choice of the checkpoint that is loaded, and what refuses one."""

import json

import pytest
import torch
from torch import nn

from tests.support.saved_runs import (
    Run,
    change_checksum,
    contents,
    names,
    refused,
    step_folder,
    watched,
)
from titan_moe.checkpoint import folder as folders


def test_load_restores_weights_moments_and_state(folder):
    run = Run(folder)
    run.save(3)
    other = Run(folder, seed=1)
    assert not torch.equal(other.weight, run.weight)
    assert other.checkpointer.load() == {"step": 3, "tokens": 0, "data": {"0": 30}}
    assert torch.equal(other.weight, run.weight)
    assert torch.equal(other.moment, run.moment)
    assert other.optimizer.state[other.model.w_EFD]["step"] == 1


def test_load_returns_none_without_a_checkpoint_or_when_disabled(folder, saved):
    assert Run(folder.parent / "fresh").checkpointer.load() is None
    assert Run(saved, enable=False).checkpointer.load() is None


def test_later_steps_are_set_aside_and_kept(tmp_path):
    for step in (5, 15, 20):
        (tmp_path / f"step-{step}").mkdir()
    folders.set_aside_later(tmp_path, 5)
    (tmp_path / "step-20").mkdir()
    folders.set_aside_later(tmp_path, 5)
    assert folders.saved_steps(tmp_path) == [5]
    kept = sorted(path.name for path in tmp_path.glob("*abandoned*"))
    assert kept == ["step-15.abandoned-1", "step-20.abandoned-1", "step-20.abandoned-2"]


def test_manifest_names_tensors_step_job_and_code(saved):
    manifest = json.loads((step_folder(saved, 2) / "manifest.json").read_text())
    assert manifest["tensors"]["model.w_EFD"] == {"shape": [2, 3, 5], "dtype": "float32"}
    assert set(manifest["checksums"]) == set(manifest["tensors"])
    assert manifest["step"] == 2
    assert manifest["job"]["training"] == {"steps": 3}
    assert manifest["code"]["torch"] == torch.__version__ and manifest["code"]["sha256"]


def test_saves_happen_at_the_first_the_last_and_every_interval_step(folder):
    run = Run(folder, interval=3, enable_first_step_checkpoint=True, keep_latest_k=0)
    done = [step for step in range(1, 8) if run.checkpointer.maybe_save(step, {}, last=step == 7)]
    assert done == [1, 3, 6, 7]
    assert names(folder) == ["step-1", "step-3", "step-6", "step-7"]
    for options in ({"load_only": True}, {"enable": False}):
        assert not Run(folder, **options).checkpointer.maybe_save(3, {}, last=True)


def test_load_step_chooses_a_step_and_sets_later_ones_aside(saved):
    refused(watched(saved, load_step=7), "load_step=7", "steps 1, 2")
    assert Run(saved, load_step=1).checkpointer.load()["step"] == 1
    assert Run(saved).checkpointer.load()["step"] == 1, "step 2 was left behind"


@pytest.mark.parametrize(
    "keys", [{"load_step": 1}, {"exclude_from_loading": ["dataloader", "optimizer"]}]
)
def test_load_step_takes_effect_once_in_a_folder(saved, keys, caplog):
    """A run that is queued again would begin again for ever."""
    first = Run(saved, seed=1, **keys)
    first.checkpointer.load()
    first.save(3)
    later = Run(saved, seed=2, **keys)
    assert later.checkpointer.load() == {"step": 3, "tokens": 0, "data": {"0": 30}}
    assert torch.equal(later.moment, first.moment)
    assert "step-3.abandoned-1" not in names(saved)
    other = Run(saved, seed=2, interval=7, **keys)  # A new version of the program may add a key.
    assert other.checkpointer.load() == {"step": 3, "tokens": 0, "data": {"0": 30}}
    ((key, value),) = keys.items()
    assert f"checkpoint.{key}={value} took effect in this folder before" in caplog.text


def test_without_its_step_a_run_goes_on_from_what_it_has_saved_itself(saved):
    keys = {"exclude_from_loading": ["train_state"]}
    first = Run(saved, **keys)
    assert "step" not in first.checkpointer.load()
    first.save(1)
    assert Run(saved, **keys).checkpointer.load()["step"] == 1
    assert names(saved) == ["step-1", "step-1.abandoned-1", "step-2.abandoned-1"]


@pytest.mark.parametrize("part", ["model", "optimizer", "train_state", "dataloader"])
def test_excluded_part_keeps_the_run_s_own_value(saved, part):
    original, run = Run(saved), Run(saved, seed=1, exclude_from_loading=[part])
    state = run.checkpointer.load()
    assert torch.equal(run.weight, original.weight) == (part != "model")
    assert torch.equal(run.moment, original.moment) == (part != "optimizer")
    assert ("step" in state) == (part != "train_state")
    assert ("data" in state) == (part != "dataloader")


def test_initial_load_path_loads_the_model_or_the_whole_state(saved, tmp_path):
    original, path = Run(saved), str(step_folder(saved, 2))
    model_only = Run(tmp_path / "a", seed=1, initial_load_path=path)
    assert model_only.checkpointer.load() is None
    assert torch.equal(model_only.weight, original.weight)
    assert not torch.equal(model_only.moment, original.moment)
    whole = Run(tmp_path / "b", seed=1, initial_load_path=path, initial_load_model_only=False)
    assert whole.checkpointer.load()["step"] == 2
    assert torch.equal(whole.moment, original.moment)


def test_own_checkpoint_wins_over_initial_load_path(saved, tmp_path):
    own = Run(tmp_path / "own", seed=1, initial_load_path=str(step_folder(saved, 2)))
    own.save(1)
    assert own.checkpointer.load()["step"] == 1


def test_seed_checkpoint_holds_the_model_alone(folder):
    seed = Run(folder, create_seed_checkpoint=True)
    seed.save(0)
    files = contents(step_folder(folder, 0))
    assert files.keys() == {".metadata", "__0_0.distcp", "manifest.json"}
    run = Run(folder, seed=1)
    assert run.checkpointer.load() is None
    assert torch.equal(run.weight, seed.weight)


def test_last_save_model_only_cannot_be_resumed(folder):
    run = Run(folder, last_save_model_only=True)
    run.save(1)
    run.save(2, last=True)
    refused(watched(folder), "step-2", "model only", "load_step", "initial_load_path")
    path = str(step_folder(folder, 2))
    refused(
        watched(folder.parent / "b", initial_load_path=path, initial_load_model_only=False),
        "initial_load_model_only=true",
    )


# --- Bad checkpoints: each is one line, nothing is run, and no file changes -----------------------


def test_checkpoint_of_other_shapes_is_refused(saved):
    wider = "model.linear.weight float32[4, 5] (wanted float32[4, 6])"
    refused(watched(saved, dim=6), "step-2", wider)
    refused(watched(saved, experts=4), "model.w_EFD float32[2, 3, 5] (wanted float32[4, 3, 5])")


def test_missing_and_extra_tensors_are_listed(saved):
    run = watched(saved)
    run.model.extra = nn.Parameter(torch.ones(1))
    del run.model.linear.bias
    run.optimizer.param_groups[0]["params"] = [run.model.w_EFD, run.model.linear.weight]
    refused(run, "it lacks model.extra", "the model lacks model.linear.bias")


def test_folder_without_a_manifest_is_refused(tmp_path):
    path = tmp_path / "foreign"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"x")
    refused(watched(tmp_path, initial_load_path=str(path)), path, "no manifest.json")


def test_wrong_checksum_names_the_tensor(saved):
    change_checksum(step_folder(saved, 2), "model.w_EFD")
    refused(watched(saved), "step-2 is damaged", "checksum of model.w_EFD")


@pytest.mark.parametrize("kept", [0.5, 0.0])
def test_tensor_file_that_was_cut_or_emptied_is_damaged(saved, kept):
    path = step_folder(saved, 2) / "__0_0.distcp"
    raw = path.read_bytes()
    half = raw[: int(kept * len(raw))]
    path.write_bytes(half or bytes(len(raw)))
    refused(watched(saved), "step-2 is damaged")


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "train_state.json", "manifest.json"])
def test_latest_that_lacks_a_file_is_not_passed_over(saved, name):
    (step_folder(saved, 2) / name).unlink()
    lacks = f"no {name}" if name == "manifest.json" else "is missing"
    refused(watched(saved), "step-2", lacks, name)
