"""build_optimizer: groups, one step by hand, and moments in bfloat16."""

import copy
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch import nn

from titan_moe.checks.notes import notes
from titan_moe.config.job_config import OPTIMIZER_KEYS, JobConfig, Optimizer, OptimizerGroup
from titan_moe.models.registry import model_config
from titan_moe.optim.optimizers import BUILDERS, build_optimizer, peak_rates
from titan_moe.runtime.ranks import run_on_ranks

MODEL = model_config("deepseek_v3", "gate")


def parameters():
    shapes = {
        "embedding.weight": (4, 3),
        "norm.weight": (3,),
        "experts.w1": (2, 3, 3),
        "experts.b1_bias": (2, 3),
        "output.bias": (4,),
    }
    named = {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    return {**named, "frozen.weight": nn.Parameter(torch.ones(2, 2), requires_grad=False)}


NAMES = get_args(Optimizer.model_fields["name"].annotation)


def test_every_optimizer_of_the_configuration_is_built_and_every_key_read():
    assert set(NAMES) == set(OPTIMIZER_KEYS) == set(BUILDERS)
    every = {"name", "lr", "weight_decay", "groups"}
    keys = {key for keys in OPTIMIZER_KEYS.values() for key in keys}
    assert keys | every == set(Optimizer.model_fields)


class Listener:
    """A table of the configuration that remembers the keys that are read."""

    def __init__(self, config: Optimizer) -> None:
        self.config, self.read = config, set[str]()

    def __getattr__(self, key: str):
        self.read.add(key)
        return getattr(self.config, key)


@pytest.mark.parametrize("name", NAMES)
def test_a_key_is_said_to_have_no_effect_if_its_optimizer_does_not_read_it(name: str):
    groups = [OptimizerGroup(pattern="experts", lr=1.0)]
    listener, named = Listener(Optimizer(name=name, groups=groups)), parameters()
    optimizer = build_optimizer(listener, named.items(), MODEL)
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    other = {"groups": groups, "implementation": "foreach", "state_dtype": "bfloat16"}
    other |= {"muon_momentum": 0.5, "muon_steps": 3, "muon_dtype": "stored", "muon_rms": 0.5}
    other |= {"lr": 0.5, "weight_decay": 0.25, "beta1": 0.5, "beta2": 0.5, "eps": 0.1}
    assert {*other, "name"} == set(Optimizer.model_fields)
    job = JobConfig(optimizer={"name": name, **other})
    said = {line.partition("=")[0] for line in notes(job, MODEL, 1) if "does not read it" in line}
    assert said == {f"optimizer.{key}" for key in {*other} - listener.read}


def test_norms_and_biases_do_not_decay_and_frozen_parameters_stay_out():
    named = parameters()
    names = {id(param): name for name, param in named.items()}
    optimizer = build_optimizer(Optimizer(lr=0.5, weight_decay=0.25), named.items(), MODEL)
    groups = {
        group["name"]: (
            [names[id(param)] for param in group["params"]],
            group["weight_decay"],
            group["peak_lr"],
        )
        for group in optimizer.param_groups
    }
    assert groups == {
        "decay": (["embedding.weight", "experts.w1"], 0.25, 0.5),
        "no_decay": (["norm.weight", "experts.b1_bias", "output.bias"], 0.0, 0.5),
    }


def test_the_first_group_that_matches_a_parameter_holds_for_it():
    named = parameters()
    names = {id(param): name for name, param in named.items()}
    groups = [{"pattern": "w1", "lr": 2.0}, {"pattern": "experts", "weight_decay": 0.75}]
    config = Optimizer.model_validate({"lr": 0.5, "weight_decay": 0.25, "groups": groups})
    optimizer = build_optimizer(config, named.items(), MODEL)
    assert {
        names[id(param)]: (group["name"], group["peak_lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for param in group["params"]
    } == {
        "embedding.weight": ("decay", 0.5, 0.25),
        "experts.w1": ("decay:w1", 2.0, 0.25),
        "experts.b1_bias": ("no_decay:experts", 0.5, 0.0),
        "norm.weight": ("no_decay", 0.5, 0.0),
        "output.bias": ("no_decay", 0.5, 0.0),
    }


def rates_of_a_stage() -> dict[str, float]:
    """Peak rates where each rank has one of two layers."""
    config = Optimizer.model_validate({"lr": 0.5, "groups": [{"pattern": "layers.1", "lr": 2.0}]})
    name = f"layers.{dist.get_rank()}.weight"
    return peak_rates(
        build_optimizer(config, {name: nn.Parameter(torch.ones(2, 2))}.items(), MODEL), config
    )


def test_every_rank_of_a_pipeline_knows_the_rates_of_all_groups():
    assert run_on_ranks(rates_of_a_stage, 2) == [{"decay": 0.5, "decay:layers.1": 2.0}] * 2


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize(("name", "weight"), [("AdamW", 0.85), ("Adam", 0.9)])
def test_adam_makes_the_first_step_computed_by_hand(name, weight, implementation):
    # The first step moves by lr in the gradient's direction; AdamW takes lr * decay * weight too,
    # while Adam's decay only enlarges the gradient.
    named = {key: param for key, param in parameters().items() if param.requires_grad}
    keys = {"name": name, "lr": 0.1, "weight_decay": 0.5, "implementation": implementation}
    optimizer = build_optimizer(Optimizer(**keys), named.items(), MODEL)
    for param in named.values():
        param.grad = torch.full_like(param, 3.0)
    optimizer.step()
    torch.testing.assert_close(named["experts.w1"].data, torch.full((2, 3, 3), weight))
    torch.testing.assert_close(named["norm.weight"].data, torch.full((3,), 0.9))
    assert optimizer.defaults["fused"] is (implementation == "fused")
    assert optimizer.defaults["foreach"] is (implementation == "foreach")


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_an_update_of_bfloat16_moments_is_that_of_the_widened_ones_rounded(implementation):
    torch.manual_seed(0)
    named = {"w": nn.Parameter(torch.randn(7, 5)), "b.bias": nn.Parameter(torch.randn(5))}
    keys = {"lr": 0.1, "implementation": implementation}
    optimizer = build_optimizer(Optimizer(**keys, state_dtype="bfloat16"), named.items(), MODEL)
    for _ in range(3):
        theirs = copy.deepcopy(named)
        plain = torch.optim.AdamW(theirs.values(), lr=0.1, betas=(0.9, 0.95))
        plain.param_groups[0]["weight_decay"] = 0.0
        for name, parameter in named.items():
            parameter.grad = torch.randn_like(parameter)
            theirs[name].grad = parameter.grad.clone()
            if state := optimizer.state[parameter]:
                plain.state[theirs[name]] = {
                    "step": state["step"].clone(),
                    "exp_avg": state["exp_avg"].float(),
                    "exp_avg_sq": state["exp_avg_sq"].float(),
                }
        with torch.no_grad():
            theirs["w"].mul_(1 - 0.1 * 0.1)  # The group's own decay.
        plain.step()
        optimizer.step()
        for name, parameter in named.items():
            torch.testing.assert_close(parameter, theirs[name])
            for key in ("exp_avg", "exp_avg_sq"):
                exact = plain.state[theirs[name]][key]
                kept = optimizer.state[parameter][key]
                assert kept.dtype == torch.bfloat16
                torch.testing.assert_close(kept.float(), exact, rtol=2**-8, atol=1e-8)
