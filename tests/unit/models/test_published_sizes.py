"""Parameter counts on the meta device against the published totals and active counts."""

import pytest
import torch

from titan_moe.models.decoder import Decoder
from titan_moe.models.registry import FAMILIES, flavors, model_config

# In billions, as the model cards and papers say: total, active per token, and whether that last
# number counts the input embedding (a lookup: DeepSeek-V2-Lite's does not).
PUBLISHED = {
    ("deepseek_v3", "16B"): (15.7, 2.4, False),
    ("deepseek_v3", "236B"): (236, 21, True),
    ("deepseek_v3", "671B"): (671, 37, True),
    ("qwen3", "30B-A3B"): (30.5, 3.3, True),
    ("qwen3", "235B-A22B"): (235, 22, True),
}
# To the last parameter, as counted in torchtitan 0.2.2 for the same dimensions.
EXACT = {("deepseek_v3", "debugmodel"): 33_014_016, ("qwen3", "debugmodel_moe"): 14_428_672}


def _counts(name: str, flavor: str) -> tuple[int, float, int]:
    """Total, active including the embedding, embedding."""
    config = model_config(name, flavor)
    with torch.device("meta"):
        model = Decoder(config)
    sizes = {name: p.numel() for name, p in model.named_parameters() if not name.startswith("mtp.")}
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    total = sum(sizes.values())
    idle = routed * (1 - config.moe.top_k / config.moe.num_experts) if config.moe else 0
    return total, total - idle, sizes["tok_embeddings.weight"]


@pytest.mark.parametrize("name, flavor", PUBLISHED)
def test_totals_and_active_counts_are_the_published_ones(name: str, flavor: str):
    total, active, embedding = _counts(name, flavor)
    published_total, published_active, with_embedding = PUBLISHED[name, flavor]
    active -= 0 if with_embedding else embedding
    assert total / 1e9 == pytest.approx(published_total, rel=0.005)
    assert active / 1e9 == pytest.approx(published_active, rel=0.025)


@pytest.mark.parametrize("name, flavor", EXACT)
def test_debug_models_have_the_dimensions_of_torchtitans(name: str, flavor: str):
    assert _counts(name, flavor)[0] == EXACT[name, flavor]


def test_every_flavor_builds():
    for name in FAMILIES:
        for flavor in flavors(name):
            assert _counts(name, flavor)[0] > 0
