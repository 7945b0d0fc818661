"""Every way a checkpoint can be bad: one line, nothing is run, and no file changes."""

import json
import os

import pytest
import torch
from torch import nn

from tests.support.saved_runs import Run, refused, step_folder, watched
from titan_moe.checkpoint.digests import write_listing


def _reseal(saved):
    """Digests that agree with what a hostile hand has left behind."""
    write_listing(step_folder(saved, 2), {})


def test_another_model(saved):
    refused(
        watched(saved, dim=6), "step-2", "model.linear.weight float32[4, 5] (wanted float32[4, 6])"
    )


def test_another_number_of_experts(saved):
    refused(watched(saved, experts=4, num_experts=4), "has 2 experts, the model 4")


def test_missing_and_extra_tensors_are_listed(saved):
    run = watched(saved)
    run.model.extra = nn.Parameter(torch.ones(1))
    del run.model.linear.bias
    run.optimizer.param_groups[0]["params"] = [run.model.w_EFD, run.model.linear.weight]
    refused(run, "it lacks model.extra", "the model has not, model.linear.bias")


def test_foreign_folder(tmp_path):
    path = tmp_path / "foreign"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"x")
    refused(watched(tmp_path, initial_load_path=str(path)), path, "no manifest.json")


def test_latest_without_manifest_is_not_passed_over(saved):
    (step_folder(saved, 2) / "manifest.json").unlink()
    refused(watched(saved), "step-2", "no manifest.json")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": "two"}', "\x00"])
def test_garbled_manifest(saved, text):
    (step_folder(saved, 2) / "manifest.json").write_text(text)
    refused(watched(saved), "manifest.json is damaged")


@pytest.mark.parametrize("text", [None, "", "{}", "[]"])
def test_garbled_train_state(saved, text):
    path = step_folder(saved, 2) / "train_state.json"
    path.unlink() if text is None else path.write_text(text)
    refused(watched(saved), "train_state.json", "step-2")


def test_wrong_checksum_names_the_tensor(saved):
    path = step_folder(saved, 2) / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["checksums"]["model.w_EFD"] = "0123456789abcdef"
    path.write_text(json.dumps(manifest))
    _reseal(saved)
    refused(watched(saved), "step-2 is damaged", "checksum of model.w_EFD")


def test_flipped_byte_in_a_tensor_file(saved):
    run = Run(saved)
    path = step_folder(saved, 2) / "__0_0.distcp"
    raw = bytearray(path.read_bytes())
    at = raw.index(run.model.w_EFD.detach().numpy().tobytes())
    raw[at + 7] ^= 1
    path.write_bytes(raw)
    refused(watched(saved), "step-2", "model.w_EFD")


def test_truncated_tensor_file(saved):
    path = step_folder(saved, 2) / "__0_0.distcp"
    os.truncate(path, path.stat().st_size // 2)
    refused(watched(saved), "step-2 is damaged")


def test_emptied_tensor_file_of_right_length(saved):
    path = step_folder(saved, 2) / "__0_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))
    refused(watched(saved), "step-2 is damaged")


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_missing_file(saved, name):
    (step_folder(saved, 2) / name).unlink()
    refused(watched(saved), "step-2 is incomplete", name)
