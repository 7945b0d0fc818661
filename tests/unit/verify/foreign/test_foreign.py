"""Steps of transformers with planted mistakes: the report explains each, and bad folders are
refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.foreign.write_step import gradients_of, write_facts, write_tensors
from tests.support.commands import run_command
from titan_moe.verify.parity.check import cases
from titan_moe.verify.parity.oracle import Oracle, computing_in

Tensors = dict[str, Tensor]
_GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
_ROUTER = "model.layers.1.mlp.gate.weight"
_OPTIMIZER = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
_STEP, _MODEL = "step", "model"


def _batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 96, (4, 13), generator=torch.Generator().manual_seed(1))
    labels = tokens[:, 1:].clone()
    for row in range(4):
        labels[row, : 2 * row] = -100
    return tokens[:, :-1].contiguous(), labels


def _loss(model: Oracle, tokens: Tensor, labels: Tensor, num_targets: int) -> Tensor:
    (logits,) = model(tokens, None)
    flat = logits.flatten(0, 1), labels.flatten()
    return (
        torch.nn.functional.cross_entropy(*flat, ignore_index=-100, reduction="sum") / num_targets
    )


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of a float64 model of transformers, and the folder of its weights."""
    folder = tmp_path_factory.mktemp("foreign")
    case = next(case for case in cases() if str(case) == "qwen3: plain")
    tokens, labels = _batch()
    with computing_in(torch.float64):
        oracle = Oracle(case.settings, seed=0)
        model = oracle.model
        model.save_pretrained(folder / _MODEL)
        layers: Tensors = {}
        for number, layer in enumerate(model.model.layers):
            layer.register_forward_hook(
                lambda _, __, out, n=number: layers.update({f"layers.{n}": out.detach().clone()})
            )
        loss = _loss(oracle, tokens, labels, int((labels != -100).sum()))
        loss.backward()
        step = folder / _STEP
        gradients, none = gradients_of(model)
        write_tensors(step, "gradients", gradients)
        adamw = torch.optim.AdamW(model.parameters(), **_OPTIMIZER)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        adamw.step()
    write_tensors(step, "updated", dict(model.named_parameters()))
    save_file(layers, step / "activations.safetensors")
    facts = {"program": "transformers", "version": "5", "layout": "dp=2,ep=4", "dtype": "float64"}
    facts |= {"loss": loss.item(), "grad_norm": norm, "max_norm": 0.5, "optimizer": _OPTIMIZER}
    write_facts(step, tokens, labels, **facts, no_gradient=none)
    return folder


def judge(folder: Path) -> tuple[int, str]:
    done = run_command("verify", "foreign", folder / _STEP, "--model", folder / _MODEL)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def planted(honest: Path, tmp_path: Path) -> Path:
    return shutil.copytree(honest, tmp_path, dirs_exist_ok=True)


def change(folder: Path, file: str, edit: Callable[[Tensors], object]) -> None:
    path = folder / _STEP / f"{file}.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def change_facts(folder: Path, **facts: object) -> None:
    path = folder / _STEP / "foreign.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def test_honest_step_agrees_in_all_parts(honest: Path) -> None:
    code, text = judge(honest)
    print(text)
    assert code == 0
