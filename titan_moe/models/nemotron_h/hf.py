"""Nemotron-H and Nemotron 3 (arXiv 2504.03624 and 2512.20856), from the config.json files of
nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16, nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8 and
nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16: each layer is one part, of Mamba-2, of attention
without positions, of experts, or dense.

The depth of multi-token prediction is a layer of attention and one of experts, which transformers
leaves out.
"""

from collections.abc import Sequence
from dataclasses import replace

from titan_moe.config.errors import ConfigError
from titan_moe.models import hf_family as hf
from titan_moe.models import hf_names as names
from titan_moe.models.config import ModelConfig
from titan_moe.models.recurrent_config import Mamba2Config
from titan_moe.ops.activation import Activation

MODEL_TYPES = ("nemotron_h",)

_SQUARED = Activation("relu2", gated=False)
_STATES = {
    "num_key_heads": "n_groups",
    "num_value_heads": "mamba_num_heads",
    "key_dim": "ssm_state_size",
    "value_dim": "mamba_head_dim",
    "conv_size": "conv_kernel",
    "conv_bias": "use_conv_bias",
    "time_step_min": "time_step_min",
    "time_step_max": "time_step_max",
    "time_step_floor": "time_step_floor",
}
_DENSE = hf.Form(
    family="nemotron_h",
    architecture="NemotronH",
    recurrent=Mamba2Config,
    keys={
        **hf.GQA_KEYS,
        "norm_eps": "layer_norm_epsilon",
        **{f"recurrent.{name}": key for name, key in _STATES.items()},
    },
    defaults={
        "max_position_embeddings": 4096,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "layer_norm_epsilon": 1e-5,
        "use_conv_bias": True,
        "time_step_min": 0.001,
        "time_step_max": 0.1,
        "time_step_floor": 1e-4,
    },
    # transformers reads no attention_bias, and ties nothing.
    fixed={
        "attention_bias": False,
        "mamba_hidden_act": "silu",
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "tie_word_embeddings": False,
        "use_bias": False,
    },
    fields={"activation": _SQUARED},
    rope=None,
)
_MOE = replace(
    _DENSE,
    keys={
        **_DENSE.keys,
        **{path: key for path, key in hf.ROUTER_KEYS.items() if path.startswith("moe.")},
        "moe.latent_dim": "moe_latent_size",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    defaults={
        **_DENSE.defaults,
        "moe_latent_size": None,
        "routed_scaling_factor": 1.0,
    },
    fields={**_DENSE.fields, "moe.activation": _SQUARED, "moe.score": "sigmoid"},
)
# Letters of hybrid_override_pattern -> words of layers_block_type, those of transformers 5 last.
_KINDS = {
    "M": ("mamba", "linear_attention"),
    "*": ("attention", "full_attention"),
    "E": ("moe",),
    "-": ("mlp",),
}
_SHARED = "moe_shared_expert_intermediate_size"


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    pattern = "hybrid_override_pattern"
    kinds = _kinds(settings.get("layers_block_type") or hf.needed(settings, pattern))
    hf.only(settings, sliding_window=(), num_hidden_layers=(len(kinds),))
    settings = {**settings, "num_hidden_layers": len(kinds)}
    letters = {"pattern": _written(kinds, "ra--"), "ffn_pattern": _written(kinds, "--fd")}
    if "E" not in kinds:
        hf.only(settings, num_nextn_predict_layers=(0,))
        return _DENSE.config(_DENSE.read(settings) | letters)
    if hf.given(settings, "num_nextn_predict_layers", 0):
        hf.only(settings, num_nextn_predict_layers=(1,))
        ahead = settings.get("mtp_layers_block_type") or settings.get(f"mtp_{pattern}")
        hf.only({f"mtp_{pattern}": _kinds(ahead or "*E")}, **{f"mtp_{pattern}": ("*E",)})
    shared = hf.shared_experts(settings, _SHARED)
    # A model without a dense layer has no use for their width.
    width = hf.given(settings, "intermediate_size", settings["moe_intermediate_size"])
    settings |= {"n_shared_experts": shared, "intermediate_size": width}
    return _MOE.config(_MOE.read(settings) | letters)


def _kinds(listed: Sequence[str]) -> str:
    """Returns the letters of all layers, by a list of words or a pattern."""
    letters = {each: letter for letter, words in _KINDS.items() for each in (letter, *words)}
    if unknown := sorted({*listed} - {*letters}):
        known = ", ".join(_KINDS)
        raise ConfigError(
            f"config.json: layers of the kinds {unknown} are not supported: only {known}"
        )
    return "".join(letters[word] for word in listed)


def _written(kinds: str, ours: str) -> str:
    return kinds.translate(str.maketrans("".join(_KINDS), ours))


def to_hf(config: ModelConfig) -> hf.Settings:
    """A config.json of these dimensions."""
    letters = map(_letter, [config] * config.num_layers, range(config.num_layers))
    settings = {"hybrid_override_pattern": "".join(letters)}
    if config.num_mtp_layers:
        settings["mtp_hybrid_override_pattern"] = "*E"
    if (moe := config.moe) is None:
        return _DENSE.write(config, **settings)
    # transformers builds one shared expert, whatever its width.
    own = {_SHARED: moe.num_shared_experts * moe.hidden_dim, "n_shared_experts": 1}
    return {**_MOE.write(config, **settings), **own}


def _letter(config: ModelConfig, layer: int) -> str:
    mixer, feeds = config.mixer(layer), config.is_moe_layer(layer) or config.is_dense_layer(layer)
    if (mixer is None) is not feeds:
        raise ConfigError(f"the Hugging Face form of {_DENSE.family} has layers of one part alone")
    if mixer is None:
        return "E" if config.is_moe_layer(layer) else "-"
    return "M" if config.recurs(layer) else "*"


_UP_DOWN = {"w1": "up_proj", "w2": "down_proj"}
_BLOCK = {
    **names.renamed("*_norm.weight", "norm.weight", {"attention": "", "ffn": ""}),
    **names.renamed("attention.*.weight", "mixer.*_proj.weight", {f"w{x}": x for x in "qkvo"}),
    **names.renamed("attention.*.weight", "mixer.*.weight", {"out_norm.scale": "norm"}),
    **names.renamed("attention.*.weight", "mixer.*.weight", {"out_proj": "out_proj"}),
    **names.renamed("attention.decay.*.weight", "mixer.*", ("A_log", "D", "dt_bias")),
    **names.renamed("feed_forward.*.weight", "mixer.*.weight", _UP_DOWN),
    **names.renamed(
        "moe.*.weight",
        "mixer.*.weight",
        {"router.gate": "gate", "to_experts": "fc1_latent_proj", "from_experts": "fc2_latent_proj"},
    ),
    **names.renamed("moe.router.*", "mixer.gate.*", {"expert_bias": "e_score_correction_bias"}),
    **names.renamed("moe.shared_experts.*.weight", "mixer.shared_experts.*.weight", _UP_DOWN),
    **names.either(
        names.renamed("moe.experts.*", "mixer.experts.{expert}.*.weight", _UP_DOWN),
        names.renamed("moe.experts.*", "mixer.experts.*", _UP_DOWN),
    ),
}
_AROUND = {
    "embedding_norm": "0.enorm",
    "hidden_norm": "0.hnorm",
    "projection": "0.eh_proj",
    "norm": "1.final_layernorm",
}


def keys(config: ModelConfig) -> names.HFKeys:
    """Names of each tensor, published ones before those of transformers 5 in memory."""
    assert isinstance(config.recurrent, Mamba2Config)
    recurrent = config.recurrent
    keys = recurrent.num_key_heads * recurrent.key_dim
    values = recurrent.num_value_heads * recurrent.value_dim
    convolved = {"v": values, "k": keys, "q": keys}
    projected = {"in_proj.z": values, **{f"in_proj.{x}": size for x, size in convolved.items()}}
    projected["gates.dt"] = recurrent.num_value_heads
    block = {
        **_BLOCK,
        **names.sections("attention.*.weight", "mixer.in_proj.weight", **projected),
        **names.sections("attention.conv.*.weight", "mixer.conv1d.weight", **convolved),
        **names.sections("attention.conv_bias.*.weight", "mixer.conv1d.bias", **convolved),
    }
    found = names.either(_model(block, "backbone."), _model(block, "model."))
    found = {**found, **names.renamed("*.weight", "*.weight", {"output": "lm_head"})}
    return {**found, **_ahead(block)} if config.num_mtp_layers == 1 else found


def _model(block: names.HFKeys, prefix: str) -> names.HFKeys:
    ends = {"tok_embeddings": "embeddings", "norm": "norm_f"}
    return {
        **names.renamed("*.weight", f"{prefix}*.weight", ends),
        **names.in_layers(block, theirs=prefix + "layers.{layer}."),
    }


def _ahead(block: names.HFKeys) -> names.HFKeys:
    """Names of multi-token prediction's one depth: a layer that attends, and one of experts."""
    ours = "mtp.layers.{layer}."
    attends = {name: ways for name, ways in block.items() if name.startswith("attention")}
    return {
        **names.renamed(f"{ours}*.weight", "mtp.layers.*.weight", _AROUND),
        **names.in_layers(block, f"{ours}block.", "mtp.layers.1."),
        **names.in_layers(attends, f"{ours}block.", "mtp.layers.0."),
    }
