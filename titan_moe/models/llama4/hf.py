"""Llama 4's text model, from the `text_config` that Llama-4-Scout-17B-16E-Instruct and
Llama-4-Maverick-17B-128E-Instruct are published with.

Scout's base model differs from its Instruct model in rotary scaling (8 instead of 16, with a band
of blended channels) and in length (262,144 tokens): import it from its own config.json. The text
model is read alone (`llama4_text`), or inside the published one (`llama4`).
"""

from titan_moe.config.errors import ConfigError
from titan_moe.models import hf_family as hf
from titan_moe.models import hf_names as names
from titan_moe.models.config import ModelConfig, PositionTemperature, RopeConfig

MODEL_TYPES = ("llama4_text",)

_FORM = hf.Form(
    family="llama4",
    model_type="llama4_text",
    architecture="Llama4",
    keys=hf.LOCAL_EXPERT_KEYS | {"hidden_dim": "intermediate_size_mlp"},
    defaults={"max_position_embeddings": 131_072, "rms_norm_eps": 1e-5},
    fixed={"router_jitter_noise": 0.0},
    fields={"moe.num_shared_experts": 1, "moe.score": "sigmoid", "moe.weights_scale": "inputs"},
    rope={"theta": 5e5, "pairing": "neighbours"},
)


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    fields = _FORM.read(settings)
    fields |= {
        "attention.qk_norm": "unweighted" if hf.given(settings, "use_qk_norm", True) else "none",
        "attention.temperature": _temperature(settings),
        **_near(settings, fields["attention.rope"]),
        "moe_every": _moe_every(settings),
    }
    return _FORM.config(fields)


def _temperature(settings: hf.Settings) -> PositionTemperature | None:
    # Published as the number 4 or as a boolean.
    if not hf.given(settings, "attn_temperature_tuning", True):
        return None
    return PositionTemperature(
        scale=hf.given(settings, "attn_scale", 0.1),
        floor=int(hf.given(settings, "floor_scale", 8192)),
    )


def _near(settings: hf.Settings, rope: RopeConfig) -> hf.Fields:
    # Layers without rotary positions are those that see the whole sequence.
    num_layers = settings["num_hidden_layers"]
    every = hf.given(settings, "no_rope_layer_interval", 4)
    rotates = settings.get("no_rope_layers") or [(n + 1) % every for n in range(num_layers)]
    if len(rotates) < num_layers:
        problem = f"must have {num_layers} entries, not {len(rotates)}"
        raise ConfigError(f"config.json: no_rope_layers {problem}")
    sees_all = [not each for each in rotates[:num_layers]]
    kinds = [hf.FULL if each else "chunked_attention" for each in sees_all]
    hf.only(settings, layer_types=(kinds,))
    return {
        "attention.rope": None,
        "near.rope": rope,
        **hf.near_layers(sees_all, hf.given(settings, "attention_chunk_size", 8192), "chunk"),
    }


def _moe_every(settings: hf.Settings) -> int:
    listed, num_layers = settings.get("moe_layers"), settings["num_hidden_layers"]
    if listed is None:
        return hf.given(settings, "interleave_moe_layer_step", 1)
    layers = [layer for layer in range(num_layers) if layer in listed]
    every = layers[0] + 1 if layers else 0
    if layers and layers != list(range(every - 1, num_layers, every)):
        raise ConfigError(f"config.json: moe_layers must repeat with a fixed step: {listed}")
    return every


def to_hf(config: ModelConfig) -> hf.Settings:
    """A config.json of these dimensions."""
    attention, layers = _FORM.attention_of(config), range(config.num_layers)
    temperature = attention.temperature or PositionTemperature(scale=0.1, floor=8192)
    return _FORM.write(
        config,
        attention_chunk_size=hf.near_size(config),
        no_rope_layers=[int(config.mixer(layer) is config.near) for layer in layers],
        use_qk_norm=attention.qk_norm == "unweighted",
        attn_temperature_tuning=attention.temperature is not None,
        attn_scale=temperature.scale,
        floor_scale=temperature.floor,
        interleave_moe_layer_step=config.moe_every,
        moe_layers=[layer for layer in layers if config.is_moe_layer(layer)],
    )


_BLOCK: names.HFKeys = {
    **names.GQA_BLOCK,
    **names.renamed("feed_forward.*.weight", "feed_forward.*.weight", names.PROJECTIONS),
    **names.renamed(
        "moe.shared_experts.*.weight", "feed_forward.shared_expert.*.weight", names.PROJECTIONS
    ),
    **names.renamed("moe.*.weight", "feed_forward.*.weight", {"router.gate": "router"}),
    **names.stacks("feed_forward.experts", transposed=True),
}


def keys(config: ModelConfig) -> names.HFKeys:
    """Names of each tensor. Biases of the routing have no place."""
    return names.in_model(_BLOCK)
