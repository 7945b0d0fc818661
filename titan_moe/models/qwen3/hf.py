"""Qwen3, dense (`qwen3`) and with experts (`qwen3_moe`): arXiv 2505.09388, tables 1 and 2, and the
config.json files of Qwen/Qwen3-0.6B-Base and so on. The text models of Qwen3-VL are the same."""

from dataclasses import replace

from titan_moe.config.errors import ConfigError
from titan_moe.models import hf_family as hf
from titan_moe.models import hf_names as names
from titan_moe.models.config import ModelConfig

_WITH_EXPERTS = ("qwen3_moe", "qwen3_vl_moe_text")
MODEL_TYPES = ("qwen3", "qwen3_vl_text", *_WITH_EXPERTS)

_DENSE = hf.Form(
    family="qwen3",
    architecture="Qwen3",
    keys=hf.GQA_KEYS,
    defaults={"max_position_embeddings": 32_768, "head_dim": 128},
    fixed={"use_sliding_window": False},
    fields={"attention.qk_norm": "learned"},
)
_MOE = replace(
    _DENSE,
    model_type="qwen3_moe",
    architecture="Qwen3Moe",
    keys={**hf.GQA_KEYS, **hf.QWEN_EXPERT_KEYS},
    defaults={"max_position_embeddings": 32_768, "norm_topk_prob": False, "decoder_sparse_step": 1},
    aliases={"num_local_experts": "num_experts"},
)


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    if settings.get("model_type") not in _WITH_EXPERTS:
        return _DENSE.config(_DENSE.read(settings))
    return _MOE.config(_MOE.read(settings) | {"num_dense_layers": _dense_layers(settings)})


def _dense_layers(settings: hf.Settings) -> int:
    dense = sorted(hf.given(settings, "mlp_only_layers", []))
    if dense != list(range(len(dense))):
        raise ConfigError(f"config.json: mlp_only_layers={dense} must be the first layers")
    return len(dense)


def to_hf(config: ModelConfig) -> hf.Settings:
    """A config.json of these dimensions."""
    if config.moe is None:
        return _DENSE.write(config)
    return _MOE.write(config, mlp_only_layers=list(range(config.num_dense_layers)))


def keys(config: ModelConfig) -> names.HFKeys:
    """Names of each tensor. Biases of the routing have no place."""
    feed_forward = {**names.FEED_FORWARD, **names.EXPERTS}
    return names.in_model({**names.GQA_BLOCK, **names.QK_NORMS, **feed_forward})
