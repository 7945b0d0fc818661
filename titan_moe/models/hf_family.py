"""config.json of the families as data: its keys, what they may say, and fields that no key tells.

No torch. A family's `hf.py` has

    MODEL_TYPES     the model_type values of config.json that it reads
    from_hf, to_hf  dimensions from config.json, and config.json from dimensions
    keys            our tensors' names -> theirs, and how each is laid out (`hf_names.py`)

`from_hf` and `to_hf` share a `Form`, a table of our fields and their keys; `hf_rope.py` reads and
writes positions.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf
from operator import attrgetter
from typing import Any, Literal, get_args

from titan_moe.config.errors import ConfigError
from titan_moe.models.config import GQAConfig, IndexerConfig, MLAConfig, ModelConfig, TokenMixer
from titan_moe.models.hf_reading import Settings, given, needed, only
from titan_moe.models.hf_rope import rope_from_hf, rope_table, rope_to_hf, rotary_factor
from titan_moe.models.recurrent_config import GatedDeltaConfig
from titan_moe.moe.config import MoEConfig
from titan_moe.ops.local_attention import LocalAttention

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
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
_ALIASES = {"num_mtp_layers": "num_nextn_predict_layers"}
LATENT_ROPE: Mapping[str, Any] = {"pairing": "neighbours", "latent": True}
"""Positions of DeepSeek's attention."""
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class Form:
    """The form of config.json in which models of a family are published."""

    family: str
    model_type: str = ""
    """The model_type of config.json; "": the family's name."""
    architecture: str
    """Name of the class in transformers, without ForCausalLM."""
    attention: type[Any] = GQAConfig
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
    """Arguments of `rope_from_hf`. None: `from_hf` sets positions by kind of layer, if any."""
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
        `near` and `sparse` are those that differ from `attention`'s."""
        tables: dict[str, dict[str, Any]] = defaultdict(dict)
        for path, value in fields.items():
            table, _, name = path.rpartition(".")
            tables[table][name] = value
        for name in ("attention", "sparse"):
            if (indexer := f"{name}.indexer") in tables:
                tables[name]["indexer"] = IndexerConfig(**tables[indexer])
        kinds = {"attention": self.attention, "moe": MoEConfig, "recurrent": self.recurrent}
        made = {name: kind(**tables[name]) for name, kind in kinds.items() if name in tables}
        for name in ("near", "sparse"):
            if name in tables:
                made[name] = replace(made["attention"], **tables[name])
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
        ropes = (each.rope for each in config.attentions if each.rope)
        return {
            "architectures": [f"{self.architecture}ForCausalLM"],
            "model_type": self.model_type or self.family,
            "hidden_act": "silu",
            "num_key_value_heads": self.attention_of(config).num_kv_heads,
            **self.fixed,
            **self.required,
            **own,
            **{key: attrgetter(path)(config) for path, key in self.keys.items()},
            **({} if self.rope is None else rope_to_hf(next(ropes, None))),
        }

    def kinds_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        """The keys of layers that see the whole sequence and of others that see a window, with
        positions for each kind."""
        near = {SLIDING: config.near} if isinstance(config.near, GQAConfig) else {}
        kinds = {FULL: self.attention_of(config), **near}
        tables = {kind: rope_table(each) for kind, each in kinds.items() if each.rope}
        return {
            "layer_types": kinds_of(config, SLIDING),
            "sliding_window": near_size(config),
            "rope_parameters": tables,
        }


_TABLES = (ModelConfig, MoEConfig, IndexerConfig, *get_args(TokenMixer))
_FIELDS = {each.name: (each.type, each.default) for table in _TABLES for each in fields(table)}


def checked(values: dict[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """Returns the values of fields, by path. Raises ConfigError for a value that its field may not
    have.

    Args:
        keys: the keys of config.json that the values come from, by path.
    """
    problems = {path: _problem(path, value) for path, value in values.items()}
    wrong = [path for path, problem in problems.items() if problem]
    if wrong:
        raise ConfigError([f"config.json: {keys[p]}={values[p]!r} {problems[p]}" for p in wrong])
    return values


def _problem(path: str, value: Any) -> str:
    kind, default = _FIELDS.get(path.rpartition(".")[2], (Any, None))
    if type(None) in get_args(kind):  # An optional value.
        if value is None:
            return ""
        kind = get_args(kind)[0]
    if kind is bool and not isinstance(value, bool):
        return "must be true or false"
    if kind is float and not (type(value) in (int, float) and 0 <= value < inf):
        return "must be a number, 0 or more"
    least = 0 if default == 0 else 1
    if kind is int and not (type(value) is int and least <= value < 2**31):
        return f"must be a whole number, {least} or more"
    return ""


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
    kinds = settings.get("mlp_layer_types")
    return {} if kinds is None else {"num_dense_layers": dense_layers(kinds, len(kinds))}


def dense_layers(kinds: list[str], num_layers: int, keys: str = "mlp_layer_types") -> int:
    """Returns the number of dense layers by the kind of each layer's feed-forward. Raises
    ConfigError unless dense layers come first, naming the keys that the kinds come from."""
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (num_layers - dense):
        raise ConfigError(f"config.json: {keys}: only dense layers first, not {kinds}")
    return dense


def ffn_kinds(config: ModelConfig) -> list[str]:
    """The `mlp_layer_types` of all layers."""
    layers = range(config.num_layers)
    return ["sparse" if config.is_moe_layer(layer) else "dense" for layer in layers]


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


def attending(settings: Settings, other: str, num_layers: int, every: int = 1) -> list[bool]:
    """Returns which layers see the whole sequence, by `layer_types`; without that key, each
    `every`-th does.

    Raises ConfigError unless each layer is such a layer, or of the `other` kind.
    """
    kinds = settings.get("layer_types")
    if kinds is None:
        return [(layer + 1) % every == 0 for layer in range(num_layers)]
    if len(kinds) < num_layers or set(kinds) - {other, FULL}:
        raise ConfigError(
            f"config.json: layer_types: only {other} or {FULL}, {num_layers} times: {kinds}"
        )
    return [kind == FULL for kind in kinds[:num_layers]]


def near_layers(
    attends: Sequence[bool], size: int, style: Literal["window", "chunk"] = "window"
) -> Fields:
    """Returns the fields that tell layers that see the whole sequence from those that see the near
    past. `size`: how many tokens the latter see."""
    return {"near.local": LocalAttention(style, size), "pattern": pattern_of(attends, "n")}


def positions_of(name: str, positions: Settings, head_dim: int) -> Fields:
    """Returns the positions of one kind of attention, and the share of a head's channels that they
    rotate. `name`: our name of its table."""
    return {
        f"{name}.rope": rope_from_hf(positions, partial=True),
        f"{name}.partial_rotary_factor": rotary_factor(positions, head_dim, 1.0),
    }


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
