"""config.json of the families as data: its keys, what they may say, and fields that no key tells.

No torch. A family's `hf.py` has

    MODEL_TYPES     the model_type values of config.json that it reads
    from_hf, to_hf  dimensions from config.json, and config.json from dimensions
    keys            our tensors' names -> theirs, and how each is laid out (`hf_names.py`)

`from_hf` and `to_hf` share a `Form`, a table of our fields and their keys. Positions are read in
two forms: that of published models (`rope_theta`, `rope_scaling`), and what transformers 5 writes
(`rope_parameters`). The first is written, which all readers know.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Literal

from titan_moe.config.errors import ConfigError
from titan_moe.models.config import (
    GatedDeltaConfig,
    IndexerConfig,
    Llama3Scaling,
    MLAConfig,
    ModelConfig,
    RopeConfig,
    YarnScaling,
    checked,
)
from titan_moe.moe.config import MoEConfig

Settings = Mapping[str, Any]
"""A config.json."""
Fields = dict[str, Any]
"""Fields of a ModelConfig by path: {"dim": 256, "attention.num_heads": 8, "moe.top_k": 2}."""

# Paths of our fields -> the keys of config.json that hold them, in every family.
_DECODER_KEYS = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "hidden_dim": "intermediate_size",
    "attention.num_heads": "num_attention_heads",
    "attention.bias": "attention_bias",
    "tied_embeddings": "tie_word_embeddings",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
}
GQA_KEYS = {
    **_DECODER_KEYS,
    "attention.num_kv_heads": "num_key_value_heads",
    "attention.head_dim": "head_dim",
}
MLA_KEYS = {
    **_DECODER_KEYS,
    "attention.q_rank": "q_lora_rank",
    "attention.kv_rank": "kv_lora_rank",
    "attention.nope_dim": "qk_nope_head_dim",
    "attention.rope_dim": "qk_rope_head_dim",
    "attention.v_dim": "v_head_dim",
    "num_mtp_layers": "num_nextn_predict_layers",
}
# Keys of routers with sigmoid scores and a bias, and of DeepSeek-V2's.
ROUTER_KEYS = {
    "moe.num_experts": "n_routed_experts",
    "moe.top_k": "num_experts_per_tok",
    "moe.hidden_dim": "moe_intermediate_size",
    "moe.num_shared_experts": "n_shared_experts",
    "moe.normalize_top_k": "norm_topk_prob",
    "moe.route_scale": "routed_scaling_factor",
    "moe.num_groups": "n_group",
    "moe.top_groups": "topk_group",
    "num_dense_layers": "first_k_dense_replace",
}
QWEN_EXPERT_KEYS = {
    "moe.num_experts": "num_experts",
    "moe.top_k": "num_experts_per_tok",
    "moe.hidden_dim": "moe_intermediate_size",
    "moe.normalize_top_k": "norm_topk_prob",
    "moe_every": "decoder_sparse_step",
}
# Keys of models whose layers all have experts; then of those among them that have no biases.
LOCAL_EXPERT_KEYS = {
    **GQA_KEYS,
    "moe.num_experts": "num_local_experts",
    "moe.top_k": "num_experts_per_tok",
    "moe.hidden_dim": "intermediate_size",
}
BLOCK_SPARSE_KEYS = {path: key for path, key in LOCAL_EXPERT_KEYS.items() if "bias" not in path}
_DEFAULTS = {
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "num_nextn_predict_layers": 0,
}
_ALIASES = {"num_mtp_layers": "num_nextn_predict_layers"}
LATENT_ROPE: Mapping[str, Any] = {"pairing": "neighbours", "latent": True}
"""Positions of DeepSeek's attention."""
FULL = "full_attention"


@dataclass(frozen=True)
class Form:
    """The form of config.json in which models of a family are published."""

    family: str
    model_type: str
    architecture: str
    """Name of the class in transformers, without ForCausalLM."""
    attention: type[Any]
    keys: Mapping[str, str]
    """Paths of our fields -> keys."""
    defaults: dict[str, Any]
    """Values of keys that config.json may leave out."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Keys that are read with this value alone, and written."""
    required: dict[str, Any] = field(default_factory=dict)
    """Keys that config.json must have, with this value alone: without them it is another model."""
    fields: Fields = field(default_factory=dict)
    """Fields that no key tells."""
    rope: Mapping[str, Any] | None = field(default_factory=dict)
    """Arguments of `rope_from_hf`. None: no layer has positions."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Keys that transformers writes -> the published keys, which go before them; and `_ALIASES`."""
    recurrent: type[Any] = GatedDeltaConfig

    def read(self, settings: Settings) -> Fields:
        """Returns the fields. Raises ConfigError for what is missing, or is not supported."""
        names = {**_ALIASES, **self.aliases}
        settings = {key: value for key, value in settings.items() if value is not None}
        settings = {names[key]: settings[key] for key in names if key in settings} | settings
        only(settings, hidden_act=("silu",), **{key: (it,) for key, it in self.fixed.items()})
        for key, value in self.required.items():
            only({key: needed(settings, key)}, **{key: (value,)})
        is_latent = self.attention is MLAConfig
        defaults = {**({} if is_latent else _gqa_defaults(settings)), **_DEFAULTS, **self.defaults}
        fields = {
            path: given(settings, key, defaults[key]) if key in defaults else needed(settings, key)
            for path, key in self.keys.items()
        }
        rope = None if self.rope is None else rope_from_hf(settings, **self.rope)
        fields = checked(fields, self.keys) | {"attention.rope": rope}
        if fields.get("moe.num_groups", 1) > 1:  # The best two experts tell a group's score.
            fields["moe.group_score_top"] = 2
        rotated = "attention.partial_rotary_factor"
        if rotated in fields:
            fields[rotated] = rotary_factor(settings, fields["attention.head_dim"], fields[rotated])
        if is_latent:
            fields |= _latent(settings)
        return fields | self.fields

    def config(self, fields: Fields) -> ModelConfig:
        """The dimensions with these fields, dense where none of them is under `moe`. Fields under
        `near` are those that differ from `attention`'s."""
        tables: dict[str, dict[str, Any]] = defaultdict(dict)
        for path, value in fields.items():
            table, _, name = path.rpartition(".")
            tables[table][name] = value
        if "attention.indexer" in tables:
            tables["attention"]["indexer"] = IndexerConfig(**tables["attention.indexer"])
        kinds = {"attention": self.attention, "moe": MoEConfig, "recurrent": self.recurrent}
        made = {name: kind(**tables[name]) for name, kind in kinds.items() if name in tables}
        if "near" in tables:
            made["near"] = replace(made["attention"], **tables["near"])
        return ModelConfig(**{"moe": None, **tables[""], **made})

    def attention_of(self, config: ModelConfig) -> Any:
        """The attention, which is of the one kind that the published code has. Raises ConfigError
        for any other."""
        if isinstance(config.attention, self.attention):
            return config.attention
        raise ConfigError(
            f"the Hugging Face form of {self.family} has no place for attention of a "
            f"{type(config.attention).__name__}, only of a {self.attention.__name__}: add it "
            f"to titan_moe/models/{self.family}/hf.py"
        )

    def write(self, config: ModelConfig, **own: Any) -> dict[str, Any]:
        """A config.json of these dimensions, with the family's `own` keys."""
        rope = next((each.rope for each in config.attentions if each.rope), None)
        return {
            "architectures": [f"{self.architecture}ForCausalLM"],
            "model_type": self.model_type,
            "hidden_act": "silu",
            "num_key_value_heads": self.attention_of(config).num_kv_heads,
            **self.fixed,
            **self.required,
            **own,
            **{key: attrgetter(path)(config) for path, key in self.keys.items()},
            **({} if self.rope is None else rope_to_hf(rope)),
        }


def needed(settings: Settings, key: str) -> Any:
    """A value without which there is no model. Raises ConfigError where it is missing or null."""
    if settings.get(key) is None:
        raise ConfigError(f"config.json: {key} is missing")
    return settings[key]


def given(settings: Settings, key: str, default: Any) -> Any:
    """A value, or the default where it is missing or null."""
    value = settings.get(key)
    return default if value is None else value


def only(settings: Settings, **allowed: tuple[Any, ...]) -> None:
    """Raises ConfigError for a key with a value other than these; one without a value passes."""
    lines = [
        f"config.json: {key}={settings[key]!r} is not supported: only "
        + " or ".join(map(repr, values))
        for key, values in allowed.items()
        if settings.get(key) is not None and settings[key] not in values
    ]
    if lines:
        raise ConfigError(lines)


def _gqa_defaults(settings: Settings) -> dict[str, Any]:
    """Defaults of the heads that share keys and values, and of their channels."""
    keys = {"attention.num_heads": "num_attention_heads", "dim": "hidden_size"}
    heads, dim = checked({path: needed(settings, key) for path, key in keys.items()}, keys).values()
    return {"num_key_value_heads": heads, "head_dim": dim // heads}


def _latent(settings: Settings) -> Fields:
    """Returns the number of dense layers if `mlp_layer_types` says it. Raises ConfigError for heads
    that share keys, and for layers without experts among others."""
    only(settings, num_key_value_heads=(needed(settings, "num_attention_heads"),))
    only(settings, mlp_bias=(False,), moe_layer_freq=(1,), rope_interleave=(True,))
    if (kinds := settings.get("mlp_layer_types")) is None:
        return {}
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        raise ConfigError(f"config.json: mlp_layer_types: only dense layers first, not {kinds}")
    return {"num_dense_layers": dense}


def recurrent_of(config: ModelConfig, family: str) -> GatedDeltaConfig:
    """The recurrent layers of a family that has some, and experts. Raises ConfigError without."""
    if not isinstance(config.recurrent, GatedDeltaConfig) or config.moe is None:
        raise ConfigError(f"the Hugging Face form of {family} has recurrent layers and experts")
    return config.recurrent


def shared_experts(settings: Settings, key: str) -> int:
    """Returns how many experts are as wide as the shared one. Raises ConfigError for a fraction."""
    width, expert = needed(settings, key), "moe_intermediate_size"
    if width % needed(settings, expert):
        raise ConfigError(
            f"config.json: {key}={width} must be a multiple of {expert}={settings[expert]}"
        )
    return int(width // settings[expert])


def attending(settings: Settings, other: str, num_layers: int) -> list[bool] | None:
    """Returns which layers see the whole sequence, by `layer_types`; None without that key.

    Raises ConfigError unless each layer is such a layer, or of the `other` kind.
    """
    kinds = settings.get("layer_types")
    if kinds is not None and (len(kinds) < num_layers or set(kinds) - {other, FULL}):
        raise ConfigError(
            f"config.json: layer_types: only {other} or {FULL}, {num_layers} times: {kinds}"
        )
    return kinds and [kind == FULL for kind in kinds[:num_layers]]


def of_layers(settings: Settings, layers: Sequence[int], own: Fields) -> Fields:
    """Returns the keys of config.json that these layers have for themselves. `own`: as published;
    transformers 5 writes them in `per_layer_config`, which goes before them.

    Raises ConfigError if other layers are in that table, or these differ in it.
    """
    table = settings.get("per_layer_config")
    if table is None:
        return own
    named = {int(layer): values for layer, values in table.items() if values}
    if sorted(named) != list(layers) or any(x != named[layers[0]] for x in named.values()):
        raise ConfigError(
            f"config.json: per_layer_config must be the same for layers {list(layers)}, and empty "
            f"for others: {table}"
        )
    return dict(named[layers[0]])


def kinds_of(config: ModelConfig, other: str) -> list[str]:
    """The `layer_types` of all layers: those that do not see the whole sequence are the `other`."""
    mixers = map(config.mixer, range(config.num_layers))
    return [FULL if each is config.attention else other for each in mixers]


def near_size(config: ModelConfig) -> int | None:
    """Returns how many tokens layers of the near past see; None without such layers."""
    return config.near.local.size if config.near and config.near.local else None


def pattern_of(attends: Sequence[bool], other: str) -> str:
    """Returns the shortest pattern of layers, of which these see the whole sequence. `other`: the
    letter of the others."""
    kinds = "".join("a" if each else other for each in attends)
    lengths = range(1, len(kinds) + 1)
    return next(kinds[:n] for n in lengths if (kinds[:n] * len(kinds)).startswith(kinds))


def period(key: str, layers: Sequence[bool]) -> int:
    """Returns N where layers N - 1, 2 N - 1, ... are the true ones; 0 where none is.

    Raises ConfigError for layers without such a rule, naming the key that they come from.
    """
    every = layers.index(True) + 1 if True in layers else 0
    if list(layers) == [bool(every) and (layer + 1) % every == 0 for layer in range(len(layers))]:
        return every
    raise ConfigError(f"config.json: {key} must repeat with a fixed step: {list(layers)}")


_ORIGINAL = "original_max_position_embeddings"
_SCALINGS: dict[str, tuple[type[Any], tuple[str, ...]]] = {
    "yarn": (YarnScaling, ("factor", "beta_fast", "beta_slow")),
    "llama3": (Llama3Scaling, ("factor", "low_freq_factor", "high_freq_factor")),
}
"""Scalings of positions by rope_type, with the numbers that config.json names alike."""


def rope_to_hf(rope: RopeConfig | None) -> dict[str, Any]:
    """The keys rope_theta and rope_scaling; none without positions."""
    if rope is None:
        return {}
    scaling = rope.scaling
    if scaling is None:
        return {"rope_theta": rope.theta, "rope_scaling": None}
    kind = "yarn" if isinstance(scaling, YarnScaling) else "llama3"
    table: dict[str, Any] = {"rope_type": kind, _ORIGINAL: scaling.original_max_seq_len}
    table |= {name: getattr(scaling, name) for name in _SCALINGS[kind][1]}
    if isinstance(scaling, YarnScaling):
        table["type"] = kind
        if scaling.mscale_all_dim:
            table |= {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
        if not scaling.truncate:
            table["truncate"] = False
    return {"rope_theta": rope.theta, "rope_scaling": table}


def rope_table(rope: RopeConfig | None, factor: float) -> dict[str, Any]:
    """The table of one kind of layers in rope_parameters. `factor`: the share of a head's channels
    that rotate."""
    written = rope_to_hf(rope)
    table = {"rope_type": "default", **(written.pop("rope_scaling") or {}), **written}
    return {**table, "partial_rotary_factor": factor}


def rope_from_hf(
    settings: Settings,
    *,
    theta: float = 10_000.0,
    pairing: Literal["halves", "neighbours"] = "halves",
    latent: bool = False,
    partial: bool = False,
) -> RopeConfig:
    """Rotary positions. Raises ConfigError for a scaling that is not known.

    Args:
        theta: used where config.json has none.
        latent: DeepSeek's attention, whose softmax scale knows YaRN's mscale_all_dim. Elsewhere
            YaRN as transformers has it: cosines and sines alone are scaled.
        partial: the family reads `partial_rotary_factor`. In others transformers reads it too, but
            only where positions are scaled.
    """
    parameters = _rope_table(settings)
    if layers := [key for key, value in parameters.items() if isinstance(value, Mapping)]:
        raise ConfigError(
            f"config.json: rotary positions by kind of layer ({', '.join(layers)}) are not "
            "supported: only one table for all layers"
        )
    theta = float(of_rope(settings, "rope_theta", theta))
    kind = given(parameters, "rope_type", given(parameters, "type", "default"))
    if kind == "default":
        return RopeConfig(theta, pairing)
    only({"rope_type": kind}, rope_type=tuple(_SCALINGS))
    if not partial:
        factor = of_rope(settings, "partial_rotary_factor", 1.0)
        only({"partial_rotary_factor": factor}, partial_rotary_factor=(1.0,))
    scaling, names = _SCALINGS[kind]
    needed(parameters, "factor")
    numbers = {name: float(parameters[name]) for name in names if parameters.get(name) is not None}
    more = _yarn(parameters, latent=latent) if kind == "yarn" else {}
    longest = given(parameters, _ORIGINAL, settings.get("max_position_embeddings"))
    original = given(settings, _ORIGINAL, longest)
    return RopeConfig(
        theta, pairing, scaling(original_max_seq_len=int(original), **numbers, **more)
    )


def rotary_factor(settings: Settings, head_dim: int, default: float) -> float:
    """The share of a head's channels that rotate, by either form of config.json.

    Raises ConfigError for an odd number of channels.
    """
    factor = of_rope(settings, "partial_rotary_factor", default)
    if (rotated := int(head_dim * factor)) % 2:
        raise ConfigError(
            f"config.json: partial_rotary_factor={factor} rotates {rotated} of {head_dim} "
            "channels: only an even number is supported"
        )
    return factor


def _rope_table(settings: Settings) -> Settings:
    """Returns the table of rotary positions. rope_scaling replaces the whole of rope_parameters, as
    transformers has it."""
    return settings.get("rope_scaling") or settings.get("rope_parameters") or {}


def of_rope(settings: Settings, key: str, default: float) -> float:
    """A number of the table of rotary positions, or of config.json's first level."""
    return given(_rope_table(settings), key, given(settings, key, default))


def _yarn(parameters: Settings, *, latent: bool) -> dict[str, Any]:
    only(parameters, attention_factor=())
    both = given(parameters, "mscale", 0) and given(parameters, "mscale_all_dim", 0)
    if not (both and latent):
        only(parameters, mscale_all_dim=(0, 0.0))
    return {
        # transformers scales cosines and sines by the plain rule unless both are given.
        "mscale": float(parameters["mscale"]) if both else 1.0,
        "mscale_all_dim": float(given(parameters, "mscale_all_dim", 0.0)) if latent else 0.0,
        "truncate": bool(given(parameters, "truncate", True)),
    }
