"""DeepSeek-V3.2 (arXiv 2512.02556) and GLM-5 (arXiv 2602.15763), whose attention sees the keys that
an indexer selects, from the config.json files of deepseek-ai/DeepSeek-V3.2-Exp and zai-org/GLM-5.

The two differ in how positions rotate the indexer's channels: halves of a head in DeepSeek-V3.2,
neighbours in GLM-5. Attention itself rotates neighbours in both. GLM-5.2 has layers without an
indexer, which see the keys that the layer before sees.
"""

from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.models import hf_family as hf
from titan_moe.models.config import IndexerConfig, MLAConfig, ModelConfig
from titan_moe.models.hf_mla import MLA_BLOCK, MLA_KEYS, read_mla

_FAMILY = "deepseek_v32"
_GLM = "glm_moe_dsa"
MODEL_TYPES = (_FAMILY, _GLM)

_FULL, _SHARED = "full", "shared"

_KEYS = {**MLA_KEYS, **hf.ROUTER_KEYS}
_INDEXER_KEYS = {
    "attention.indexer.num_heads": "index_n_heads",
    "attention.indexer.head_dim": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}
_DEFAULTS = hf.DEFAULTS | {
    "max_position_embeddings": 163_840,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
}
_GLM_DEFAULTS = {
    "max_position_embeddings": 202_752,
    "rms_norm_eps": 1e-5,
    "n_group": 1,
    "topk_group": 1,
}


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    glm = settings.get("model_type") == _GLM
    hf.only(settings, hidden_act=("silu",), scoring_func=("sigmoid",), topk_method=("noaux_tc",))
    hf.only(settings, indexer_rope_interleave=(glm,), index_topk_pattern=())
    if not glm:
        hf.only(settings, index_topk_freq=(1,), indexer_types=())
    if other := set(hf.given(settings, "layer_types", [])) - {"indexed_attention"}:
        only = "only indexed_attention is supported"
        raise ConfigError(f"config.json: layer_types: {only}, not {other.pop()}")
    fields = read_mla(settings, _KEYS, _DEFAULTS | (_GLM_DEFAULTS if glm else {}))
    indexer = hf.read_fields(settings, _INDEXER_KEYS, {})
    fields |= {
        "attention.indexer": IndexerConfig(
            **{path.rpartition(".")[2]: value for path, value in indexer.items()},
            pairing="neighbours" if glm else "halves",
            shared_in=_shared(settings, fields["num_layers"]) if glm else (),
        ),
        "moe.score": "sigmoid",
        "moe.group_score_top": 2 if fields["moe.num_groups"] > 1 else 1,
    }
    return hf.make_config(fields, MLAConfig)


def _shared(settings: hf.Settings, num_layers: int) -> tuple[int, ...]:
    """The layers without an indexer: as listed, or all but every so many after the first ones."""
    every = max(hf.given(settings, "index_topk_freq", 1), 1)
    skipped = hf.given(settings, "index_skip_topk_offset", 2) - 1
    after = (max(layer - skipped, 0) for layer in range(num_layers))
    kinds = hf.given(settings, "indexer_types", [_SHARED if n % every else _FULL for n in after])
    if len(kinds) != num_layers or kinds[0] != _FULL or {*kinds} - {_FULL, _SHARED}:
        known = f"full or shared for each of {num_layers} layers, and full for the first"
        raise ConfigError(f"config.json: indexer_types must be {known}")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == _SHARED)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json of these dimensions."""
    indexer = hf.attention_of(config, MLAConfig, _FAMILY).indexer
    if indexer is None or config.moe is None:
        raise ConfigError(f"the Hugging Face form of {_FAMILY} has an indexer and experts")
    glm = indexer.pairing == "neighbours"
    own: dict[str, Any] = {"indexer_rope_interleave": glm}
    if indexer.shared_in:
        layers = range(config.num_layers)
        own["indexer_types"] = [_SHARED if n in indexer.shared_in else _FULL for n in layers]
    names = ("GlmMoeDsa", _GLM) if glm else ("DeepseekV32", _FAMILY)
    return hf.settings_of(config, *names, _KEYS | _INDEXER_KEYS, **own)


def keys(config: ModelConfig) -> hf.HFKeys:
    """Names of each tensor."""
    return hf.in_model_with_mtp({**MLA_BLOCK, **hf.ROUTING_BIAS})
