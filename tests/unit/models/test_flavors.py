"""Dimensions of all flavors: against the published counts, and against what is built."""

import pytest
import torch

from titan_moe.models.decoder import Decoder
from titan_moe.models.registry import FAMILIES, flavors, model_config
from titan_moe.models.stats import Size, attention_stats, part_sizes, total

# Billions of parameters by model cards and papers: total; active per token (None: dense); and the
# vocabulary's matrices in the latter: both (2), the output layer's (1) or none (0).
PUBLISHED = {
    ("deepseek_v3", "16B"): (15.7, 2.4, 1),
    ("deepseek_v3", "236B"): (236, 21, 2),
    ("deepseek_v3", "671B"): (671, 37, 2),
    ("deepseek_v32", "671B"): (671, None, 2),  # Published with V3's counts, without an indexer.
    ("deepseek_v32", "GLM-5"): (744, 40, 0),
    ("deepseek_v3", "Moonlight-16B-A3B"): (15.96, 2.91, 2),
    ("deepseek_v3", "Kimi-K2"): (1040, 32.6, 2),
    ("gemma4", "26B-A4B"): (25.2, 3.8, 2),
    ("glm4_moe", "GLM-4.5-Air"): (106, 12, 0),
    ("glm4_moe", "GLM-4.5"): (355, 32, 0),
    ("glm4_moe", "GLM-4.6"): (355, 32, 0),
    ("glm4_moe", "GLM-4.7-Flash"): (30, None, 0),  # "3B" active.
    # The model cards' tables count the output layer alone as active.
    ("gpt_oss", "20b"): (20.91, 3.61, 1),
    ("gpt_oss", "120b"): (116.83, 5.13, 1),
    ("kimi_linear", "48B-A3B"): (49.1, None, 2),  # By the weights' files; "3B" active.
    # 109 and 400 with the vision tower, of 0.9.
    ("llama4", "17bx16e"): (108.1, 17, 2),
    ("llama4", "17bx128e"): (400, 17, 2),
    ("mimo_v2", "V2-Flash"): (309, 15, 1),
    ("minimax_m2", "MiniMax-M2"): (230, 10, 0),
    ("mixtral", "8x7B"): (46.7, 12.9, 2),
    ("mixtral", "8x22B"): (141, 39, 2),
    ("nemotron_h", "56B"): (56.3, None, 2),
    ("nemotron_h", "30B-A3B"): (31.6, 3.6, 2),
    ("nemotron_h", "120B-A12B"): (120.6, 12.7, 2),
    ("nemotron_h", "550B-A55B"): (550, 55, 1),
    ("qwen3", "0.6B"): (0.6, None, 2),
    ("qwen3", "1.7B"): (1.7, None, 2),
    ("qwen3", "4B"): (4.0, None, 2),
    ("qwen3", "8B"): (8.2, None, 2),
    ("qwen3", "14B"): (14.8, None, 2),
    ("qwen3", "32B"): (32.8, None, 2),
    ("qwen3", "30B-A3B"): (30.5, 3.3, 2),
    ("qwen3", "235B-A22B"): (235, 22, 2),
    ("qwen3_next", "80B-A3B"): (80, None, 2),  # "3B" active, of 3.25 without embeddings.
    ("qwen3_next", "Qwen3.5-35B-A3B"): (35, 3, 1),
    ("qwen3_next", "Qwen3.5-122B-A10B"): (122, 10, 2),
    ("qwen3_next", "Qwen3.5-397B-A17B"): (397, 17, 2),
    ("step3p7", "Step-3.7-Flash"): (196.8, 11, 0),
}
# Exact numbers, counted in torchtitan 0.2.2 for the same dimensions.
EXACT = {("deepseek_v3", "debugmodel"): 33_014_016, ("qwen3", "debugmodel_moe"): 14_428_672}
# Counted in the models of transformers 5.24.
EXACT |= {
    ("nemotron_h", "30B-A3B"): 31_577_937_344,
    ("nemotron_h", "56B"): 56_324_350_464,
    ("nemotron_h", "120B-A12B"): 120_668_687_360,
    ("nemotron_h", "550B-A55B"): 549_308_968_960,
}
_ALL = [(name, flavor) for name in FAMILIES for flavor in flavors(name)]


@pytest.mark.parametrize("name, flavor", PUBLISHED)
def test_totals_and_active_counts_are_the_published_ones(name: str, flavor: str):
    config = model_config(name, flavor)
    published, published_active, vocabularies = PUBLISHED[name, flavor]
    size = total(config)
    assert sum(size) / 1e9 == pytest.approx(published, rel=0.015 if published > 1 else 0.05)
    if published_active is not None:
        active = size.active(config) - (2 - vocabularies) * config.vocab_size * config.dim
        assert active / 1e9 == pytest.approx(published_active, rel=0.025)


@pytest.mark.parametrize("name, flavor", _ALL)
def test_experts_of_every_flavor_are_balanced(name: str, flavor: str):
    moe = model_config(name, flavor).moe
    assert moe is None or moe.is_balanced


@pytest.mark.parametrize("name, flavor", EXACT)
def test_sizes_are_exactly_those_of_the_same_dimensions_elsewhere(name: str, flavor: str):
    assert sum(total(model_config(name, flavor))) == EXACT[name, flavor]


@pytest.mark.parametrize("name, flavor", _ALL)
def test_sizes_by_arithmetic_equal_the_models(name: str, flavor: str):
    config = model_config(name, flavor)
    with torch.device("meta"):
        model = Decoder(config)
    built = dict.fromkeys(part_sizes(config), Size(0))
    for parameter_name, parameter in model.named_parameters():
        parts = parameter_name.split(".")
        part = ".".join(parts[:2]) if parts[0] == "layers" else parts[0]
        routed = ".moe.experts." in parameter_name
        size = built[part]
        built[part] = Size(
            size.dense + parameter.numel() * (not routed), size.routed + parameter.numel() * routed
        )
    assert built == part_sizes(config)
    for number, layer in enumerate(model.layers.values()):
        if (mixer := config.mixer(number)) is None:
            assert layer.attention is None
            continue
        parameters = list(layer.attention.parameters())
        counted = attention_stats(mixer, config.dim)
        assert counted.parameters == sum(p.numel() for p in parameters)
        assert counted.matrices == sum(p.numel() for p in parameters if p.ndim > 1)
