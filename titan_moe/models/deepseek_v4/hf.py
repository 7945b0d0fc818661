"""DeepSeek-V4, from the config.json files of deepseek-ai/DeepSeek-V4-Flash and DeepSeek-V4-Pro.

Layers see a window alone, or compressed blocks beside it: all of them, or those that an indexer
selects. Multi-token prediction is left out, as transformers does.
"""

from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.models import hf_family as hf
from titan_moe.models import hf_names as names
from titan_moe.models.config import CompressedConfig, ModelConfig, RopeConfig
from titan_moe.ops.activation import Activation
from titan_moe.ops.local_attention import LocalAttention

MODEL_TYPES = ("deepseek_v4",)

_SPARSE, _WHOLE = "compressed_sparse_attention", "heavily_compressed_attention"
_LETTERS = {"sliding_attention": "n", _SPARSE: "s", _WHOLE: "a"}
# Numbers in compress_ratios name kinds of layers, whatever compress_rates says.
_RATIOS = {"n": 0, "s": 4, "a": 128}
_HASH = "hash_moe"
_FORM = hf.Form(
    family="deepseek_v4",
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
        "sparse.indexer.num_heads": "index_n_heads",
        "sparse.indexer.head_dim": "index_head_dim",
        "sparse.indexer.top_k": "index_topk",
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
    fields, rates = _FORM.read(settings), hf.given(settings, "compress_rates", {})
    layers = fields["num_layers"]
    if (kinds := settings.get("layer_types")) is None:
        named = {_RATIOS[letter]: kind for kind, letter in _LETTERS.items()}
        kinds = [named.get(ratio) for ratio in hf.needed(settings, "compress_ratios")]
    if len(kinds) < layers or not {*kinds} <= {*_LETTERS}:
        known = ", ".join(_LETTERS)
        raise ConfigError(f"config.json: layer_types: only {known}, {layers} times: {kinds}")
    feeds = settings.get("mlp_layer_types") or [_HASH] * hf.needed(settings, "num_hash_layers")
    hashed = feeds.count(_HASH)
    hf.only({"mlp_layer_types": _HASH in feeds[hashed:] or None}, mlp_layer_types=())
    limited = Activation(limit=float(hf.needed(settings, "swiglu_limit")))
    near, far = _ropes(settings)
    return _FORM.config(
        {
            **fields,
            "attention.rope": far,
            "attention.local": LocalAttention("window", hf.needed(settings, "sliding_window")),
            "attention.ratio": rates.get(_WHOLE, _RATIOS["a"]),
            "near.rope": near,
            "near.ratio": 0,
            "sparse.ratio": rates.get(_SPARSE, _RATIOS["s"]),
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
    hf.only(far, attention_factor=(1.0,), mscale=(1.0,), mscale_all_dim=(1.0,))
    plain = {"attention_factor": None, "mscale": 1.0, "mscale_all_dim": 1.0}
    how: dict[str, Any] = {**hf.LATENT_ROPE, "partial": True}
    return [hf.rope_from_hf({"rope_parameters": {**x, **plain}}, **how) for x in (near, far)]


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json of these dimensions."""
    whole, near, sparse, moe = _FORM.attention_of(config), config.near, config.sparse, config.moe
    assert isinstance(near, CompressedConfig) and isinstance(sparse, CompressedConfig) and moe
    far = hf.rope_to_hf(whole.rope)
    pattern = (config.pattern * config.num_layers)[: config.num_layers]
    return _FORM.write(
        config,
        compress_ratios=[_RATIOS[letter] for letter in pattern],
        compress_rates={_SPARSE: sparse.ratio, _WHOLE: whole.ratio},
        num_hash_layers=config.num_hash_layers,
        sliding_window=hf.near_size(config),
        swiglu_limit=moe.activation.limit,
        compress_rope_theta=far.pop("rope_theta"),
        rope_theta=hf.rope_to_hf(near.rope)["rope_theta"],
        **far,
    )


_SAME = ("wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "wo_a", "indexer.wq_b", "indexer.weights_proj")
_COMPRESSOR = {x: x for x in ("wkv.weight", "wgate.weight", "norm.weight")} | {"bias": "ape"}
_STREAMS = {"weight": "fn", "bias": "base", "scale": "scale"}
_ROUTER = {"gate.weight": "weight", "expert_bias": "bias", "table": "tid2eid"}
_MATRICES = {name: name for name in names.PROJECTIONS}
_PUBLISHED: names.HFKeys = {
    **names.renamed("attention.*.weight", "attn.*.weight", {x: x for x in _SAME} | {"wo": "wo_b"}),
    **names.renamed("attention.compressor.*", "attn.compressor.*", _COMPRESSOR),
    **names.renamed("attention.indexer.compressor.*", "attn.indexer.compressor.*", _COMPRESSOR),
    **names.renamed("attention.sinks.*", "attn.*", {"weight": "attn_sink"}),
    **names.renamed("*_norm.weight", "*_norm.weight", {"attention": "attn", "ffn": "ffn"}),
    **names.renamed("attention_streams.*", "hc_attn_*", _STREAMS),
    **names.renamed("ffn_streams.*", "hc_ffn_*", _STREAMS),
    **names.renamed("moe.router.*", "ffn.gate.*", _ROUTER),
    **names.renamed("moe.shared_experts.*.weight", "ffn.shared_experts.*.weight", _MATRICES),
    **names.renamed("moe.experts.*", "ffn.experts.{expert}.*.weight", _MATRICES),
}
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
_ENDS = {"tok_embeddings": "embed", "norm": "norm", "output": "head"}
_MODEL = names.either(
    names.renamed("*.weight", "*.weight", _ENDS),
    names.renamed("norm.streams.*", "hc_head_*", _STREAMS),
    names.in_layers(_PUBLISHED, theirs="layers.{layer}."),
    names.renamed("norm.streams.*", "model.hc_head.hc_*", _STREAMS),
    names.in_model(names.either(_WRITTEN, _MEMORY)),
)


def keys(config: ModelConfig) -> names.HFKeys:
    """Names of each tensor. Routers with a table have no bias of the routing."""
    hashed = (f"layers.{layer}.moe.router.expert_bias" for layer in range(config.num_hash_layers))
    return {**_MODEL, **dict.fromkeys(hashed, ())}
