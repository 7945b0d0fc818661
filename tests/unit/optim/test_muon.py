"""Newton-Schulz against singular values, and a step of Muon by hand."""

import pytest
import torch
from torch import nn

from titan_moe.config.job_config import Optimizer
from titan_moe.models.registry import model_config
from titan_moe.optim.muon import orthogonalized
from titan_moe.optim.optimizers import build_optimizer
from titan_moe.verify.gradients.reference import orthogonal

MODEL = model_config("deepseek_v3", "gate")


@pytest.mark.parametrize("shape", [(1, 5, 5), (3, 4, 9), (3, 9, 4), (2, 1, 6), (2, 3, 1)])
def test_newton_schulz_brings_singular_values_near_one(shape):
    torch.manual_seed(0)
    x_NAB = torch.randn(shape, dtype=torch.float64)
    made = orthogonalized(x_NAB, 5)
    for matrix, ours in zip(x_NAB, made, strict=True):
        torch.testing.assert_close(ours, orthogonal(matrix, 5), rtol=1e-11, atol=1e-12)
        assert ((torch.linalg.svdvals(ours) - 1).abs() < 0.35).all()


@pytest.mark.parametrize("dtype, same", [("stored", True), ("bfloat16", False)])
def test_a_step_in_bfloat16_is_nearly_that_of_float32(dtype, same):
    steps = []
    for word in ("auto", dtype):
        named = parameters()
        config = Optimizer(name="Muon", lr=0.1, weight_decay=0.0, muon_dtype=word)
        before = {name: each.detach().clone() for name, each in named.items()}
        for each in named.values():
            each.grad = torch.ones_like(each).cumsum(-1).sin()
        build_optimizer(config, named.items(), MODEL).step()
        steps.append({n: each.detach() - before[n] for n, each in named.items()})
    moved = "layers.0.moe.experts.w1"
    assert torch.equal(steps[0][moved], steps[1][moved]) == same
    assert (steps[0][moved] - steps[1][moved]).norm() < 0.05 * steps[0][moved].norm()


def parameters():
    torch.manual_seed(1)
    shapes = {
        "tok_embeddings.weight": (6, 4),
        "layers.0.attention.wq.weight": (8, 4),
        "layers.0.attention.norm.weight": (4,),
        "layers.0.moe.router.gate.weight": (3, 4),
        "layers.0.moe.experts.w1": (3, 5, 4),
        "layers.0.moe.experts.b1": (3, 5),
        "mtp.layers.0.projection.weight": (4, 8),
        "mtp.layers.0.tok_embeddings.weight": (6, 4),
        "output.weight": (6, 4),
    }
    return {name: nn.Parameter(torch.randn(s, dtype=torch.float64)) for name, s in shapes.items()}


def groups_of(optimizer, named):
    names = {id(parameter): name for name, parameter in named.items()}
    return {g["name"]: [names[id(p)] for p in g["params"]] for g in optimizer.param_groups}


def test_muon_updates_matrices_inside_layers_alone():
    named = parameters()
    groups = groups_of(build_optimizer(Optimizer(name="Muon"), named.items(), MODEL), named)
    assert groups == {
        "matrices": [
            "layers.0.attention.wq.weight",
            "layers.0.moe.experts.w1",
            "mtp.layers.0.projection.weight",
        ],
        "decay": [
            "tok_embeddings.weight",
            "layers.0.moe.router.gate.weight",
            "mtp.layers.0.tok_embeddings.weight",
            "output.weight",
        ],
        "no_decay": ["layers.0.attention.norm.weight", "layers.0.moe.experts.b1"],
    }
    assert "matrices" not in groups_of(build_optimizer(Optimizer(), named.items(), MODEL), named)


def test_muon_makes_the_steps_computed_by_hand():
    config = Optimizer(name="Muon", lr=0.1, weight_decay=0.5, muon_momentum=0.8, muon_rms=0.3)
    named = parameters()
    expected = {name: p.detach().clone() for name, p in named.items()}
    buffers = {name: torch.zeros_like(p) for name, p in expected.items()}
    optimizer = build_optimizer(config, named.items(), MODEL)
    for _ in range(2):
        for name, parameter in named.items():
            gradient = torch.randn_like(parameter)
            parameter.grad = gradient.clone()
            buffers[name] = 0.8 * buffers[name] + 0.2 * gradient
            direction = 0.8 * buffers[name] + 0.2 * gradient
            matrices = (x.view(-1, *x.shape[-2:]) for x in (expected[name], direction))
            for matrix, along in zip(*matrices, strict=True):
                update = orthogonal(along, 5) if along.ndim == 2 else along
                matrix.mul_(1 - 0.1 * 0.5).sub_(0.1 * 0.3 * max(matrix.shape) ** 0.5 * update)
        optimizer.step()
    for name in groups_of(optimizer, named)["matrices"]:
        torch.testing.assert_close(named[name].detach(), expected[name])
        state = optimizer.state[named[name]]
        assert state.keys() == {"momentum_buffer"}
        torch.testing.assert_close(state["momentum_buffer"], buffers[name])
    assert optimizer.state[named["output.weight"]].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_parameters_without_a_gradient_are_left_alone():
    named = parameters()
    before = {name: p.detach().clone() for name, p in named.items()}
    named["layers.0.moe.experts.w1"].grad = torch.ones(3, 5, 4, dtype=torch.float64)
    build_optimizer(Optimizer(name="Muon"), named.items(), MODEL).step()
    moved = [name for name, p in named.items() if not torch.equal(p, before[name])]
    assert moved == ["layers.0.moe.experts.w1"]
