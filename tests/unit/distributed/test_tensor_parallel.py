"""What a plan may not name. That plans train the same model is the gate's business."""

from dataclasses import replace
from fnmatch import fnmatchcase
from types import SimpleNamespace

import pytest
import torch

from titan_moe.distributed.tensor_parallel import apply_tensor_parallel
from titan_moe.models.decoder import Decoder
from titan_moe.models.registry import FAMILIES, flavors, model_config
from titan_moe.models.tensor_plans import DECODER


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


def test_an_unknown_way_to_cut_is_refused():
    with pytest.raises(ValueError, match="'diagonal' is none of gather, colwise, rowwise"):
        apply_tensor_parallel(gate_model(), {"output": "diagonal"}, NoMeshes())


def test_every_pattern_of_the_plan_names_a_module():
    configs = [config for family in FAMILIES for config in flavors(family).values()]
    with torch.device("meta"):
        models = [Decoder(replace(config, num_layers=4)) for config in configs]
    names = {name for model in models for name, _ in model.named_modules()}
    for pattern in DECODER:
        if "sinks" in pattern and "gpt_oss" not in FAMILIES:
            continue
        assert any(fnmatchcase(name, pattern) for name in names), pattern
