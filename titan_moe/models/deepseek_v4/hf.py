"""DeepSeek-V4, from the config.json files of deepseek-ai/DeepSeek-V4-Flash and DeepSeek-V4-Pro.

Layers see a window alone, or compressed blocks beside it: all of them, or those that an indexer
selects. Multi-token prediction is left out, as transformers does.
"""

from dataclasses import replace
from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.models import hf_family as hf
from titan_moe.models import hf_names as names
from titan_moe.models.config import (
    CompressedConfig,
    IndexerConfig,
    ModelConfig,
    RopeConfig,
    YarnScaling,
)
from titan_moe.ops.activation import Activation
from titan_moe.ops.local_attention import LocalAttention

MODEL_TYPES = ("deepseek_v4",)

_WINDOW = "sliding_attention"
_SPARSE, _WHOLE = "compressed_sparse_attention", "heavily_compressed_attention"
_RATES = {_SPARSE: 4, _WHOLE: 128}
_LETTERS = {_WINDOW: "n", _SPARSE: "s", _WHOLE: "a"}
# Numbers in compress_ratios name kinds of layers, whatever compress_rates says.
_KINDS = {0: _WINDOW, 4: _SPARSE, 128: _WHOLE}
_HASH = "hash_moe"
_INDEX = ("num_heads", "index_n_heads"), ("head_dim", "index_head_dim"), ("top_k", "index_topk")
_FORM = hf.Form(
    family="deepseek_v4",
    model_type="deepseek_v4",
    architecture="DeepseekV4",
    attention=CompressedConfig,
    keys={
        **{p: k for p, k in hf.GQA_KEYS.items() if "bias" not in p and "kv_heads" not in p},
        **{f"moe.{x}": hf.ROUTER_KEYS[f"moe.{x}"] for x in ("num_experts", "top_k", "route_scale")},
        **dict.fromkeys(("hidden_dim", "moe.hidden_dim"), "moe_intermediate_size"),
        "attention.query_rank": "q_lora_rank",
        "attention.rope_dim": "qk_rope_head_dim",
        "attention.output_groups": "o_groups",
        "attention.output_rank": "o_lora_rank",
        "streams": "hc_mult",
        "sinkhorn_steps": "hc_sinkhorn_iters",
        "streams_eps": "hc_eps",
    },
    defaults={"max_position_embeddings": 1_048_576},
    # transformers reads neither attention_bias nor norm_topk_prob nor topk_method.
    fixed={"mlp_bias": False, "n_shared_experts": 1, "num_key_value_heads": 1},
    required={"scoring_func": "sqrtsoftplus"},
    fields={"moe.num_shared_experts": 1, "moe.score": "sqrtsoftplus", "moe.normalize_top_k": True},
    rope=None,
)


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    fields, rates = _FORM.read(settings), _RATES | hf.given(settings, "compress_rates", {})
    layers, hashed = fields["num_layers"], settings.get("num_hash_layers")
    if (kinds := settings.get("layer_types")) is None:
        kinds = [_KINDS.get(ratio) for ratio in hf.needed(settings, "compress_ratios")]
    if len(kinds) < layers or not {*kinds} <= {*_LETTERS}:
        known = ", ".join(_LETTERS)
        raise ConfigError(f"config.json: layer_types: only {known}, {layers} times: {kinds}")
    if hashed is None:
        feeds = hf.needed(settings, "mlp_layer_types")
        hashed = feeds.count(_HASH)
        hf.only({"mlp_layer_types": _HASH in feeds[hashed:] or None}, mlp_layer_types=())
    limited = Activation(limit=float(hf.needed(settings, "swiglu_limit")))
    near, far = _ropes(settings)
    return _FORM.config(
        {
            **fields,
            "attention.rope": far,
            "attention.local": LocalAttention("window", hf.needed(settings, "sliding_window")),
            "attention.ratio": rates[_WHOLE],
            "near.rope": near,
            "near.ratio": 0,
            "sparse.ratio": rates[_SPARSE],
            "sparse.indexer": IndexerConfig(**{n: hf.needed(settings, k) for n, k in _INDEX}),
            "pattern": "".join(_LETTERS[kind] for kind in kinds[:layers]),
            "num_hash_layers": hashed,
            "activation": limited,
            "moe.activation": limited,
        }
    )


def _ropes(settings: hf.Settings) -> list[RopeConfig]:
    """Returns the positions of layers with a window alone, and of the others, whose cosines and
    sines have no factor under YaRN."""
    tables = hf.given(settings, "rope_parameters", {})
    near, far = tables.get("main"), tables.get("compress")
    if far is None:
        near = {"rope_theta": hf.needed(settings, "rope_theta")}
        far = {**(settings.get("rope_scaling") or tables)}
        far["rope_theta"] = hf.needed(settings, "compress_rope_theta")
    hf.only(far, attention_factor=(1.0,))
    found = []
    for table in (near, {key: value for key, value in far.items() if key != "attention_factor"}):
        rope = hf.rope_from_hf({"rope_parameters": table}, pairing="neighbours", partial=True)
        if isinstance(rope.scaling, YarnScaling):
            rope = replace(rope, scaling=replace(rope.scaling, mscale_all_dim=1.0))
        found.append(rope)
    return found


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json of these dimensions."""
    whole, near, sparse, moe = _FORM.attention_of(config), config.near, config.sparse, config.moe
    if not (isinstance(near, CompressedConfig) and isinstance(sparse, CompressedConfig) and moe):
        raise ConfigError("the Hugging Face form of deepseek_v4 has three kinds of layers, experts")
    assert near.rope and whole.local
    far = hf.rope_to_hf(whole.rope)
    if far["rope_scaling"]:
        far["rope_scaling"] = {k: x for k, x in far["rope_scaling"].items() if "mscale" not in k}
    rates = {_SPARSE: sparse.ratio, _WHOLE: whole.ratio}
    ratios = {_LETTERS[kind]: ratio for ratio, kind in _KINDS.items()}
    pattern = (config.pattern * config.num_layers)[: config.num_layers]
    return _FORM.write(
        config,
        compress_ratios=[ratios[letter] for letter in pattern],
        **({} if rates == _RATES else {"compress_rates": rates}),
        num_hash_layers=config.num_hash_layers,
        sliding_window=whole.local.size,
        swiglu_limit=moe.activation.limit,
        **{key: getattr(sparse.indexer, name) for name, key in _INDEX},
        compress_rope_theta=far.pop("rope_theta"),
        rope_theta=near.rope.theta,
        **far,
    )


_STREAMS = {"weight": "fn", "bias": "base", "scale": "scale"}
_COMPRESSORS = ("compressor", "indexer.compressor")
_MATRICES = {name: name for name in names.PROJECTIONS}
_ALIKE = [
    "wq_a",
    "q_norm",
    "wq_b",
    "wkv",
    "kv_norm",
    "wo_a",
    "indexer.wq_b",
    "indexer.weights_proj",
]
_ALIKE += [f"{x}.{name}" for x in _COMPRESSORS for name in ("wkv", "wgate", "norm")]
_PUBLISHED = {
    **names.renamed("attention.*.weight", "attn.*.weight", {x: x for x in _ALIKE} | {"wo": "wo_b"}),
    **names.renamed("attention.*.bias", "attn.*.ape", {x: x for x in _COMPRESSORS}),
    **names.renamed("attention.*.weight", "attn.*", {"sinks": "attn_sink"}),
    **names.renamed("*_norm.weight", "*_norm.weight", {"attention": "attn", "ffn": "ffn"}),
    **names.renamed("attention_streams.*", "hc_attn_*", _STREAMS),
    **names.renamed("ffn_streams.*", "hc_ffn_*", _STREAMS),
    **names.renamed(
        "moe.router.*", "ffn.gate.*",
        {"gate.weight": "weight", "expert_bias": "bias", "table": "tid2eid"},
    ),
    **names.renamed("moe.shared_experts.*.weight", "ffn.shared_experts.*.weight", _MATRICES),
    **names.renamed("moe.experts.*", "ffn.experts.{expert}.*.weight", _MATRICES),
}  # fmt: skip
# Parts of published names -> those in the memory of transformers, replaced one after another.
_REPLACED = {
    "indexer.weights": "indexer.scorer.weights", "indexer.compressor.": "indexer.",
    "indexer.": "compressor.indexer.", ".norm.": ".kv_norm.", "q_norm": "q_a_norm",
    "wq_a": "q_a_proj", "wq_b": "q_b_proj", "wkv": "kv_proj", "wgate": "gate_proj",
    "wo_a": "o_a_proj", "wo_b": "o_b_proj", "attn_sink": "sinks", ".ape": ".position_bias",
    "attn.": "self_attn.", "gate.bias": "gate.e_score_correction_bias", "ffn.": "mlp.",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "hc_attn_": "attn_hc.", "hc_ffn_": "ffn_hc.",
}  # fmt: skip


def _in_memory(name: str) -> str:
    for part, other in _REPLACED.items():
        name = name.replace(part, other)
    return name


_MEMORY = {
    **{ours: (names.HFWeight(_in_memory(way.name)),) for ours, (way,) in _PUBLISHED.items()},
    **names.SHARED_EXPERTS,
    **names.stacks("mlp.experts"),
}
# transformers writes one norm's name as that of another.
_WRITTEN = {**_PUBLISHED, "attention.kv_norm.weight": (names.HFWeight("attn.norm.weight"),)}
_ENDS = names.either(
    names.renamed(
        "*.weight", "*.weight", {"tok_embeddings": "embed", "norm": "norm", "output": "head"}
    ),
    names.EMBEDDINGS,
    names.renamed("norm.streams.*", "hc_head_*", _STREAMS),
    names.renamed("norm.streams.*", "model.hc_head.hc_*", _STREAMS),
)


def keys(config: ModelConfig) -> names.HFKeys:
    """Names of each tensor. Routers with a table have no bias of the routing."""
    forms = (_PUBLISHED, "layers.{layer}."), (_WRITTEN, "model.layers.{layer}."), (_MEMORY, "")
    layers = (
        names.in_layers(form, theirs=prefix or "model.layers.{layer}.") for form, prefix in forms
    )
    hashed = (f"layers.{layer}.moe.router.expert_bias" for layer in range(config.num_hash_layers))
    return {**_ENDS, **names.either(*layers), **dict.fromkeys(hashed, ())}
