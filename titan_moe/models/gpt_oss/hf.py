"""gpt-oss (arXiv 2508.10925), from the config.json files of openai/gpt-oss-20b and
openai/gpt-oss-120b. Its experts are stacks, gate and up projections interleaved."""

from titan_moe.config.errors import ConfigError
from titan_moe.models import hf_family as hf
from titan_moe.models import hf_names as names
from titan_moe.models.config import ModelConfig
from titan_moe.ops.activation import CLAMPED_SWIGLU

MODEL_TYPES = ("gpt_oss",)

_FORM = hf.Form(
    family="gpt_oss",
    architecture="GptOss",
    keys=hf.LOCAL_EXPERT_KEYS,
    defaults={"max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "attention_bias": True},
    fixed={"swiglu_limit": 7.0},
    fields={
        "attention.sinks": True,
        "moe.normalize_top_k": True,
        "moe.router_bias": True,
        "moe.projection_bias": True,
        "moe.activation": CLAMPED_SWIGLU,
    },
    rope={"theta": 150_000.0},
)


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    hf.only(settings, swiglu_alpha=(1.702,))
    # Without the key, transformers takes the published models' YaRN.
    if settings.get("rope_parameters") is None and settings.get("rope_scaling") is None:
        raise ConfigError("config.json: rope_scaling is missing; none is {'rope_type': 'default'}")
    fields = _FORM.read(settings)
    window, num_layers = settings.get("sliding_window", 128), fields["num_layers"]
    attends = hf.attending(settings, hf.SLIDING, num_layers, every=2)
    if window is not None and not all(attends):
        fields |= hf.near_layers(attends, window)
    return _FORM.config(fields)


def to_hf(config: ModelConfig) -> hf.Settings:
    """A config.json of these dimensions."""
    settings = _FORM.write(
        config,
        sliding_window=hf.near_size(config),
        layer_types=hf.kinds_of(config, hf.SLIDING),
    )
    return settings | {"rope_scaling": settings["rope_scaling"] or {"rope_type": "default"}}


_BLOCK: names.HFKeys = {
    **names.GQA_BLOCK,
    **names.renamed("attention.*.weight", "self_attn.*", {"sinks": "sinks"}),
    **names.renamed("moe.router.gate.*", "mlp.router.*", {"weight": "weight", "bias": "bias"}),
    **names.stacks("mlp.experts", transposed=True, interleaved=True),
    "moe.experts.b1": (names.HFWeight("mlp.experts.gate_up_proj_bias", rows="even"),),
    "moe.experts.b3": (names.HFWeight("mlp.experts.gate_up_proj_bias", rows="odd"),),
    "moe.experts.b2": (names.HFWeight("mlp.experts.down_proj_bias"),),
}


def keys(config: ModelConfig) -> names.HFKeys:
    """Names of each tensor. Biases of the routing's choice have no place."""
    return names.in_model(_BLOCK)
