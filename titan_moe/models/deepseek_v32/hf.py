"""DeepSeek-V3.2 (arXiv 2512.02556) and GLM-5 (arXiv 2602.15763), whose attention sees the keys that
an indexer selects, from the config.json files of deepseek-ai/DeepSeek-V3.2-Exp and zai-org/GLM-5.

The two differ in how positions rotate the indexer's channels: halves of a head in DeepSeek-V3.2,
neighbours in GLM-5. Attention itself rotates neighbours in both. GLM-5.2 has layers without an
indexer, which see the keys that the layer before sees.
"""

from dataclasses import replace

from titan_moe.config.errors import ConfigError
from titan_moe.models import hf_family as hf
from titan_moe.models import hf_names as names
from titan_moe.models.config import MLAConfig, ModelConfig

_FULL, _SHARED = "full", "shared"
_FORM = hf.Form(
    family="deepseek_v32",
    architecture="DeepseekV32",
    attention=MLAConfig,
    keys={
        **hf.MLA_KEYS,
        **hf.ROUTER_KEYS,
        "attention.indexer.num_heads": "index_n_heads",
        "attention.indexer.head_dim": "index_head_dim",
        "attention.indexer.top_k": "index_topk",
    },
    defaults={
        "max_position_embeddings": 163_840,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
    },
    fixed={"indexer_rope_interleave": False},
    fields={"attention.indexer.pairing": "halves", "moe.score": "sigmoid"},
    rope=hf.LATENT_ROPE,
)
_GLM = replace(
    _FORM,
    model_type="glm_moe_dsa",
    architecture="GlmMoeDsa",
    defaults=_FORM.defaults
    | {"max_position_embeddings": 202_752, "rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1},
    fixed={"indexer_rope_interleave": True},
    fields={"attention.indexer.pairing": "neighbours", "moe.score": "sigmoid"},
)
MODEL_TYPES = ("deepseek_v32", _GLM.model_type)


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    form = _GLM if settings.get("model_type") == _GLM.model_type else _FORM
    hf.only(settings, scoring_func=("sigmoid",), topk_method=("noaux_tc",), index_topk_pattern=())
    if other := set(hf.given(settings, "layer_types", [])) - {"indexed_attention"}:
        only = "only indexed_attention is supported"
        raise ConfigError(f"config.json: layer_types: {only}, not {other.pop()}")
    fields = form.read(settings)
    if form is _GLM:
        fields["attention.indexer.shared_in"] = _shared(settings, fields["num_layers"])
    else:
        hf.only(settings, index_topk_freq=(1,), indexer_types=())
    return form.config(fields)


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


def to_hf(config: ModelConfig) -> hf.Settings:
    """A config.json of these dimensions."""
    indexer = _FORM.attention_of(config).indexer
    if indexer is None or config.moe is None:
        raise ConfigError(f"the Hugging Face form of {_FORM.family} has an indexer and experts")
    kinds = [_SHARED if n in indexer.shared_in else _FULL for n in range(config.num_layers)]
    own = {"indexer_types": kinds} if indexer.shared_in else {}
    return (_GLM if indexer.pairing == "neighbours" else _FORM).write(config, **own)


def keys(config: ModelConfig) -> names.HFKeys:
    """Names of each tensor."""
    return names.in_model_with_mtp({**names.MLA_BLOCK, **names.ROUTING_BIAS})
