"""Helpers of the families' `hf.py`: config.json's keys and weights' names as data.

No torch. A family's `hf.py` has

    MODEL_TYPES     the model_type values of config.json that it reads
    from_hf, to_hf  dimensions from config.json, and config.json from dimensions
    keys            our tensors' names -> theirs, and how each is laid out

`from_hf` and `to_hf` share tables of our fields and their keys. Two forms of config.json are read:
that of published models (`rope_theta`, `rope_scaling`), and what transformers 5 writes
(`rope_parameters`). The first is written, which all readers know.

In names, `{layer}` stands for a number on both sides; theirs counts multi-token prediction layers
on after the others, ours from 0 under `mtp.layers`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal, TypeVar

from titan_moe.config.errors import ConfigError
from titan_moe.models.config import (
    GatedDeltaConfig,
    Llama3Scaling,
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
A = TypeVar("A")

# Paths of our fields -> the keys of config.json that hold them, in every family.
DECODER_KEYS = {
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
    **DECODER_KEYS,
    "attention.num_kv_heads": "num_key_value_heads",
    "attention.head_dim": "head_dim",
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
DEFAULTS = {
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
}
"""Values of keys that config.json may leave out."""


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


def read_fields(settings: Settings, keys: Mapping[str, str], defaults: Settings) -> Fields:
    """The fields of a table. Raises ConfigError for a missing value, or one of another kind."""
    found = {
        path: given(settings, key, defaults[key]) if key in defaults else needed(settings, key)
        for path, key in keys.items()
    }
    return checked(found, keys)


def write_fields(config: ModelConfig, keys: Mapping[str, str]) -> dict[str, Any]:
    """The keys of a table; the inverse of `read_fields`."""
    return {key: attrgetter(path)(config) for path, key in keys.items()}


def settings_of(
    config: ModelConfig, architecture: str, model_type: str, keys: Mapping[str, str], **own: Any
) -> dict[str, Any]:
    """A config.json of these dimensions: what every family says, its `own` settings, and `keys`."""
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": model_type,
        "hidden_act": "silu",
        "num_key_value_heads": config.attention.num_kv_heads,
        **own,
        **write_fields(config, keys),
        **rope_to_hf(config.rope),
    }


def gqa_defaults(settings: Settings) -> dict[str, Any]:
    """Defaults of the heads that share keys and values, and of their channels."""
    keys = {"attention.num_heads": "num_attention_heads", "dim": "hidden_size"}
    heads, dim = read_fields(settings, keys, {}).values()
    return {"num_key_value_heads": heads, "head_dim": dim // heads}


def make_config(fields: Fields, attention: type[Any]) -> ModelConfig:
    """The dimensions with these fields, dense where none of them is under `moe`."""
    tables: dict[str, dict[str, Any]] = {"": {}, "attention": {}, "moe": {}}
    for path, value in fields.items():
        table, _, name = path.rpartition(".")
        tables[table][name] = value
    return ModelConfig(
        **tables[""],
        attention=attention(**tables["attention"]),
        moe=MoEConfig(**tables["moe"]) if tables["moe"] else None,
    )


def attention_of(config: ModelConfig, kind: type[A], family: str) -> A:
    """The attention, of the one kind that a family's published code has.

    Raises ConfigError for any other.
    """
    if isinstance(config.attention, kind):
        return config.attention
    raise ConfigError(
        f"the Hugging Face form of {family} has no place for attention of a "
        f"{type(config.attention).__name__}, only of a {kind.__name__}: add it to "
        f"titan_moe/models/{family}/hf.py"
    )


def recurrent_of(config: ModelConfig, family: str) -> GatedDeltaConfig:
    """The recurrent layers of a family that has some, and experts. Raises ConfigError without."""
    if config.recurrent is None or config.moe is None:
        raise ConfigError(f"the Hugging Face form of {family} has recurrent layers and experts")
    return config.recurrent


ORIGINAL = "original_max_position_embeddings"
SCALINGS: dict[str, tuple[type[Any], tuple[str, ...]]] = {
    "yarn": (YarnScaling, ("factor", "beta_fast", "beta_slow")),
    "llama3": (Llama3Scaling, ("factor", "low_freq_factor", "high_freq_factor")),
}
"""Scalings of positions by rope_type, with the numbers that config.json names alike."""


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """The keys rope_theta and rope_scaling."""
    scaling = rope.scaling
    if scaling is None:
        return {"rope_theta": rope.theta, "rope_scaling": None}
    is_yarn = isinstance(scaling, YarnScaling)
    kind = "yarn" if is_yarn else "llama3"
    table: dict[str, Any] = {"type": kind} if is_yarn else {}
    table |= {"rope_type": kind, "factor": scaling.factor, ORIGINAL: scaling.original_max_seq_len}
    table |= {name: getattr(scaling, name) for name in SCALINGS[kind][1]}
    if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim:
        table |= {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
    if isinstance(scaling, YarnScaling) and not scaling.truncate:
        table["truncate"] = False
    return {"rope_theta": rope.theta, "rope_scaling": table}


def period(key: str, layers: Sequence[bool]) -> int:
    """Returns N where layers N - 1, 2 N - 1, ... are the true ones; 0 where none is.

    Raises ConfigError for layers without such a rule, naming the key that they come from.
    """
    every = layers.index(True) + 1 if True in layers else 0
    if list(layers) == [bool(every) and (layer + 1) % every == 0 for layer in range(len(layers))]:
        return every
    raise ConfigError(f"config.json: {key} must repeat with a fixed step: {list(layers)}")


@dataclass(frozen=True)
class Rows:
    """Rows `first` to `last` of each group of `size` rows of theirs, one group after another."""

    first: int
    last: int
    size: int


@dataclass(frozen=True)
class HFWeight:
    """One way in which a tensor of ours is stored."""

    name: str
    """Name with {layer}, and with {expert} if each expert of a stack has a tensor of its own; else
    a stack is stored whole, experts first, like ours."""
    transposed: bool = False
    """Their last two dims are ours swapped."""
    rows: Literal["whole", "first half", "second half", "even", "odd"] | Rows = "whole"
    """The stored rows that are ours, if projections share a tensor: of a matrix, its second last
    dim in our order; of a bias, its last; `Rows` of the first dim."""
    ones: tuple[int, int] = (0, 0)
    """Dims of size 1 that are stored before and after ours."""


# Our name -> the ways it may be stored; the first is how it is published, and exported. What is
# stored nowhere (the previous load; a bias that the family's published code has not) is left out,
# and so are copies of tied weights, which take what the first of their group takes.
HFKeys = Mapping[str, tuple[HFWeight, ...]]


def renamed(ours: str, theirs: str, names: Mapping[str, str]) -> HFKeys:
    """Tensors that are stored like ours; in both patterns * stands for a name of the table."""
    return {
        ours.replace("*", name): (HFWeight(theirs.replace("*", other)),)
        for name, other in names.items()
    }


# Names of the weights that all descendants of Llama have; of one layer.
EMBEDDINGS = renamed(
    "*.weight",
    "*.weight",
    {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"},
)
BLOCK_NORMS = renamed(
    "*_norm.weight", "*_layernorm.weight", {"attention": "input", "ffn": "post_attention"}
)
_HEADS = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}
GQA_BLOCK: HFKeys = {
    **BLOCK_NORMS,
    **renamed("attention.*.weight", "self_attn.*.weight", _HEADS),
    **renamed("attention.*.bias", "self_attn.*.bias", _HEADS),
}
QK_NORMS = renamed("attention.*_norm.weight", "self_attn.*_norm.weight", {"q": "q", "k": "k"})
PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
FEED_FORWARD = renamed("feed_forward.*.weight", "mlp.*.weight", PROJECTIONS)
SHARED_EXPERTS = renamed("moe.shared_experts.*.weight", "mlp.shared_experts.*.weight", PROJECTIONS)
# The form that Qwen and DeepSeek publish, or that of transformers 5 in memory.
EXPERTS: HFKeys = {
    "moe.router.gate.weight": (HFWeight("mlp.gate.weight"),),
    "moe.experts.w1": (
        HFWeight("mlp.experts.{expert}.gate_proj.weight"),
        HFWeight("mlp.experts.gate_up_proj", rows="first half"),
    ),
    "moe.experts.w2": (
        HFWeight("mlp.experts.{expert}.down_proj.weight"),
        HFWeight("mlp.experts.down_proj"),
    ),
    "moe.experts.w3": (
        HFWeight("mlp.experts.{expert}.up_proj.weight"),
        HFWeight("mlp.experts.gate_up_proj", rows="second half"),
    ),
}
ROUTING_BIAS: HFKeys = {
    "moe.router.expert_bias": (HFWeight("mlp.gate.e_score_correction_bias"),),
}
# The form that Mistral and MiniMax publish: one tensor per expert.
BLOCK_SPARSE_EXPERTS: HFKeys = {
    name: (HFWeight(f"block_sparse_moe.{theirs}.weight"), *EXPERTS[name])
    for name, theirs in (
        ("moe.router.gate.weight", "gate"),
        ("moe.experts.w1", "experts.{expert}.w1"),
        ("moe.experts.w2", "experts.{expert}.w2"),
        ("moe.experts.w3", "experts.{expert}.w3"),
    )
}
# Around the block of a multi-token prediction layer, as published by DeepSeek and Z.ai.
_MTP = renamed(
    "*.weight",
    "*.weight",
    {
        "embedding_norm": "enorm",
        "hidden_norm": "hnorm",
        "projection": "eh_proj",
        "norm": "shared_head.norm",
        "tok_embeddings": "embed_tokens",  # This and the next are copies (`HFModel.copies`).
        "output": "shared_head.head",
    },
)


def in_model(block: HFKeys) -> dict[str, tuple[HFWeight, ...]]:
    """The keys of a model with this block in each layer."""
    return {**EMBEDDINGS, **in_layers(block)}


def in_model_with_mtp(block: HFKeys) -> HFKeys:
    """The keys of a model with this block in each layer, multi-token prediction's too."""
    ahead = in_layers(block, ours="mtp.layers.{layer}.block.")
    return {**in_model(block), **ahead, **in_layers(_MTP, ours="mtp.layers.{layer}.")}


def in_layers(
    block: HFKeys, ours: str = "layers.{layer}.", theirs: str = "model.layers.{layer}."
) -> HFKeys:
    """The keys of one block, for all blocks under a prefix."""
    return {
        ours + name: tuple(replace(way, name=theirs + way.name) for way in ways)
        for name, ways in block.items()
    }
