"""Mixtral (arXiv 2401.04088), from the config.json files of mistralai/Mixtral-8x7B-v0.1 and
mistralai/Mixtral-8x22B-v0.1."""

from titan_moe.models import hf_family as hf
from titan_moe.models import hf_names as names
from titan_moe.models.config import ModelConfig

MODEL_TYPES = ("mixtral",)

_FORM = hf.Form(
    family="mixtral",
    architecture="Mixtral",
    keys=hf.BLOCK_SPARSE_KEYS,
    defaults={"max_position_embeddings": 131_072, "rms_norm_eps": 1e-5},
    fixed={"router_jitter_noise": 0.0},
    fields={"moe.normalize_top_k": True},
    rope={"theta": 1e6},
)


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    fields, window = _FORM.read(settings), settings.get("sliding_window")
    if window is not None:
        fields |= hf.near_layers([False], window)
    return _FORM.config(fields)


def to_hf(config: ModelConfig) -> hf.Settings:
    """A config.json of these dimensions."""
    return _FORM.write(config, sliding_window=hf.near_size(config))


def keys(config: ModelConfig) -> names.HFKeys:
    """Names of each tensor. Biases of the routing have no place."""
    return names.in_model({**names.GQA_BLOCK, **names.BLOCK_SPARSE_EXPERTS})
