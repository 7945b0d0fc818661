"""Whole steps in bfloat16: their gradients are those of the same steps with sums in float32."""

import pytest
from torch import nn

from tests.support.wide_sums import differences
from titan_moe.models.decoder import Decoder
from titan_moe.models.registry import FAMILIES

pytestmark = pytest.mark.slow

FLAVORS = {"qwen3": "debugmodel_moe"}
BOUND = 0.01
EXCEPTIONS = {
    # Added to all keys, it moves weight between them and a sink alone: the rest cancels.
    "attention.wk.bias": 0.05,
    # Of a head's terms, a few thousandths are left: as much as their rounding adds up to.
    "decay.A_log.weight": 0.5,
}


def bound(name: str) -> float:
    return next((bound for end, bound in EXCEPTIONS.items() if name.endswith(end)), BOUND)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_in_bfloat16_are_those_with_float32_sums(family: str):
    found = differences(family, FLAVORS.get(family, "debugmodel"), lambda model: None)
    assert {name: each for name, each in found.items() if not each < bound(name)} == {}


def test_torchs_own_embedding_is_seen():
    def plant(model: Decoder) -> None:
        weight = model.tok_embeddings.weight
        model.set_submodule("tok_embeddings", nn.Embedding(*weight.shape, _weight=weight))

    found = differences("mixtral", "debugmodel", plant)
    assert [name for name, each in found.items() if each > BOUND] == ["tok_embeddings.weight"]
