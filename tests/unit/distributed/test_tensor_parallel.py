"""Names that a plan may not have. The gate proves that plans train the same model."""

from dataclasses import replace
from fnmatch import fnmatchcase
from types import SimpleNamespace

import pytest
import torch

from titan_moe.comm import collectives
from titan_moe.distributed.tensor_parallel import apply_tensor_parallel, unplanned_modules
from titan_moe.models.decoder import Decoder
from titan_moe.models.registry import FAMILIES, flavors, model_config
from titan_moe.models.tensor_plan import TENSOR_PLAN
from titan_moe.simulate.fake_rank import fake_world


class NoMeshes:
    """Plans are looked at before a mesh is used for more than its name."""

    dims = SimpleNamespace(tp=2)

    def __getitem__(self, axis: str):
        return None

    def group(self, axis: str):
        return None


def gate_model(family: str = "deepseek_v3"):
    with torch.device("meta"):
        return Decoder(model_config(family, "gate"))


@pytest.mark.parametrize(
    "name",
    [
        "layers.*.moe",
        "layers.*.moe.router",
        "layers.*.moe.router.gate",
        "layers.*.moe.experts",
        "layers.1.moe.router.*",
    ],
)
def test_a_plan_that_touches_a_router_or_a_routed_expert_is_refused(name: str):
    with pytest.raises(ValueError, match=r"a tensor-parallel plan cannot cut layers\.1\.moe"):
        apply_tensor_parallel(gate_model(), {name: "gather"}, NoMeshes())


def test_a_module_that_the_plan_leaves_out_is_refused():
    model = gate_model()
    for layer in ("0", "1"):
        with torch.device("meta"):
            model.layers[layer].attention.gate = torch.nn.Linear(32, 4)
    whole = dict.fromkeys(TENSOR_PLAN, "whole")
    with pytest.raises(ValueError) as caught:
        apply_tensor_parallel(model, whole, NoMeshes())
    assert str(caught.value).startswith(
        "no tensor-parallel plan names layers.0.attention.gate, layers.1.attention.gate: add to "
        "titan_moe/models/tensor_plan.py how tp cuts each"
    )
    named = apply_tensor_parallel(model, {**whole, "*.attention.gate": "whole"}, NoMeshes())
    assert "layers.0.attention.gate.bias" in named


def test_the_plan_is_of_every_model_and_nothing_else():
    configs = [config for family in FAMILIES for config in flavors(family).values()]
    with torch.device("meta"):
        models = [Decoder(replace(config, num_layers=4)) for config in configs]
    for model in models:
        assert unplanned_modules(model, TENSOR_PLAN) == []
    names = {name for model in models for name, _ in model.named_modules()}
    for pattern in TENSOR_PLAN:
        if "sinks" in pattern and "gpt_oss" not in FAMILIES:
            continue
        assert any(fnmatchcase(name, pattern) for name in names), pattern


def test_micro_pipeline_pass_finds_gathers_and_scatters_of_tokens() -> None:
    """torch replaces them by operations on symmetric memory, and knows them by their form."""
    from torch._inductor.fx_passes import micro_pipeline_tp
    from torch.fx.experimental.proxy_tensor import make_fx

    def exchanged(x: torch.Tensor) -> torch.Tensor:
        group = torch.distributed.group.WORLD
        return collectives._scatter_tokens(collectives._gather_tokens(x, group), group)

    with fake_world(0, 2):
        graph = make_fx(exchanged)(torch.randn(2, 3, 4)).graph
    (gather,) = micro_pipeline_tp.find_all_gather_patterns(graph)
    (scatter,) = micro_pipeline_tp.find_reduce_scatter_patterns(graph)
    assert (gather.gather_dim, scatter.scatter_dim) == (1, 1)
