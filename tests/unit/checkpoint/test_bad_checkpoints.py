"""Every way a checkpoint can be bad: one line, nothing is run, and no file changes."""

import pytest
import torch
from torch import nn

from tests.support.saved_runs import change_checksum, refused, step_folder, watched


def test_another_model(saved):
    wider = "model.linear.weight float32[4, 5] (wanted float32[4, 6])"
    refused(watched(saved, dim=6), "step-2", wider)
    refused(watched(saved, experts=4), "model.w_EFD float32[2, 3, 5] (wanted float32[4, 3, 5])")


def test_missing_and_extra_tensors_are_listed(saved):
    run = watched(saved)
    run.model.extra = nn.Parameter(torch.ones(1))
    del run.model.linear.bias
    run.optimizer.param_groups[0]["params"] = [run.model.w_EFD, run.model.linear.weight]
    refused(run, "it lacks model.extra", "the model lacks model.linear.bias")


def test_foreign_folder(tmp_path):
    path = tmp_path / "foreign"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"x")
    refused(watched(tmp_path, initial_load_path=str(path)), path, "no manifest.json")


def test_wrong_checksum_names_the_tensor(saved):
    change_checksum(step_folder(saved, 2), "model.w_EFD")
    refused(watched(saved), "step-2 is damaged", "checksum of model.w_EFD")


@pytest.mark.parametrize("kept", [0.5, 0.0])
def test_tensor_file_that_was_cut_or_emptied(saved, kept):
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
