"""DeepSeek-V4, from the config.json files of deepseek-ai/DeepSeek-V4-Flash and DeepSeek-V4-Pro.

Layers see a window alone, or compressed blocks beside it: all of them, or those that an indexer
selects. Multi-token prediction is left out, as transformers does.
"""

from dataclasses import replace
from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.models import hf_family as hf
from titan_moe.models import hf_names as names
from titan_moe.models.config import CompressedConfig, IndexerConfig, ModelConfig, RopeConfig
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
_FORM = hf.Form(
    family="deepseek_v4",
    model_type="deepseek_v4",
    architecture="DeepseekV4",
    attention=CompressedConfig,
    keys={
        **{p: k for p, k in hf.GQA_KEYS.items() if "bias" not in p and "kv_heads" not in p},
        "attention.q_rank": "q_lora_rank",
        "attention.rope_dim": "qk_rope_head_dim",
        "attention.output_groups": "o_groups",
        "attention.output_rank": "o_lora_rank",
        "hidden_dim": "moe_intermediate_size",
        "moe.num_experts": "n_routed_experts",
        "moe.top_k": "num_experts_per_tok",
        "moe.hidden_dim": "moe_intermediate_size",
        "moe.route_scale": "routed_scaling_factor",
        "streams": "hc_mult",
        "sinkhorn_steps": "hc_sinkhorn_iters",
        "streams_eps": "hc_eps",
    },
    defaults={"max_position_embeddings": 1_048_576},
    fixed={
        "attention_bias": False,
        "mlp_bias": False,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_key_value_heads": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
    },
    fields={"moe.num_shared_experts": 1, "moe.score": "sqrtsoftplus", "moe.normalize_top_k": True},
    rope=None,
)


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    fields = _FORM.read(settings)
    layers, rates = fields["num_layers"], _RATES | hf.given(settings, "compress_rates", {})
    kinds, hashed = settings.get("layer_types"), settings.get("num_hash_layers")
    if kinds is None:
        kinds = [_KINDS.get(ratio) for ratio in hf.needed(settings, "compress_ratios")]
    if len(kinds) < layers or not {*kinds} <= {*_LETTERS}:
        raise ConfigError(f"config.json: layers must be {', '.join(_LETTERS)}, {layers} times")
    if hashed is None:
        feeds = hf.needed(settings, "mlp_layer_types")
        hashed = feeds.count(_HASH)
        if _HASH in feeds[hashed:]:
            raise ConfigError(f"config.json: mlp_layer_types: only the first may be {_HASH}")
    index = {"num_heads": "index_n_heads", "head_dim": "index_head_dim", "top_k": "index_topk"}
    limited = Activation(limit=float(hf.needed(settings, "swiglu_limit")))
    near, compressed = _ropes(settings)
    fields |= {
        "attention.rope": compressed,
        "attention.local": LocalAttention("window", hf.needed(settings, "sliding_window")),
        "attention.ratio": rates[_WHOLE],
        "near.rope": near,
        "near.ratio": 0,
        "sparse.ratio": rates[_SPARSE],
        "sparse.indexer": IndexerConfig(**{n: hf.needed(settings, k) for n, k in index.items()}),
        "pattern": "".join(_LETTERS[kind] for kind in kinds[:layers]),
        "num_hash_layers": hashed,
        "activation": limited,
        "moe.activation": limited,
    }
    return _FORM.config(fields)


def _ropes(settings: hf.Settings) -> tuple[RopeConfig, RopeConfig]:
    """Returns the positions of layers with a window alone, and of the others."""
    tables = hf.given(settings, "rope_parameters", {})
    near, far = tables.get("main"), tables.get("compress")
    if far is None:
        near = {"rope_theta": hf.needed(settings, "rope_theta")}
        far = {**(settings.get("rope_scaling") or tables)}
        far["rope_theta"] = hf.needed(settings, "compress_rope_theta")
    hf.only(far, attention_factor=(1.0,))
    far = {key: value for key, value in far.items() if key != "attention_factor"}
    first, second = (
        hf.rope_from_hf({"rope_parameters": table}, pairing="neighbours", partial=True)
        for table in (near, far)
    )
    if second.scaling is not None:  # Cosines and sines have no factor.
        second = replace(second, scaling=replace(second.scaling, mscale_all_dim=1.0))
    return first, second


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json of these dimensions."""
    whole, near, sparse, moe = _FORM.attention_of(config), config.near, config.sparse, config.moe
    if not (isinstance(near, CompressedConfig) and isinstance(sparse, CompressedConfig) and moe):
        raise ConfigError("the Hugging Face form of deepseek_v4 has three kinds of layers, experts")
    assert near.rope and whole.rope and whole.local and sparse.indexer
    far = whole.rope
    if far.scaling is not None:
        far = replace(far, scaling=replace(far.scaling, mscale_all_dim=0.0))  # type: ignore[call-arg]
    pattern = (config.pattern * config.num_layers)[: config.num_layers]
    ratios = {_LETTERS[kind]: ratio for ratio, kind in _KINDS.items()}
    rates = {_SPARSE: sparse.ratio, _WHOLE: whole.ratio}
    return _FORM.write(
        config,
        compress_ratios=[ratios[letter] for letter in pattern],
        **({} if rates == _RATES else {"compress_rates": rates}),
        num_hash_layers=config.num_hash_layers,
        sliding_window=whole.local.size,
        swiglu_limit=moe.activation.limit,
        index_n_heads=sparse.indexer.num_heads,
        index_head_dim=sparse.indexer.head_dim,
        index_topk=sparse.indexer.top_k,
        **hf.rope_to_hf(far) | {"rope_theta": near.rope.theta, "compress_rope_theta": far.theta},
    )


# Our names -> theirs: as published, and in the memory of transformers.
_ENDS = {
    "tok_embeddings.weight": ("embed.weight", "model.embed_tokens.weight"),
    "norm.weight": ("norm.weight", "model.norm.weight"),
    "output.weight": ("head.weight", "lm_head.weight"),
    "norm_streams.weight": ("hc_head_fn", "model.hc_head.hc_fn"),
    "norm_streams.bias": ("hc_head_base", "model.hc_head.hc_base"),
    "norm_streams.scale": ("hc_head_scale", "model.hc_head.hc_scale"),
}
_COMPRESSOR = {
    "wkv.weight": ("wkv.weight", "kv_proj.weight"),
    "wgate.weight": ("wgate.weight", "gate_proj.weight"),
    "bias": ("ape", "position_bias"),
    "norm.weight": ("norm.weight", "kv_norm.weight"),
}
_ATTENTION = {
    "wq_a.weight": ("wq_a.weight", "q_a_proj.weight"),
    "q_norm.weight": ("q_norm.weight", "q_a_norm.weight"),
    "wq_b.weight": ("wq_b.weight", "q_b_proj.weight"),
    "wkv.weight": ("wkv.weight", "kv_proj.weight"),
    "kv_norm.weight": ("kv_norm.weight", "kv_norm.weight"),
    "wo_a.weight": ("wo_a.weight", "o_a_proj.weight"),
    "wo.weight": ("wo_b.weight", "o_b_proj.weight"),
    "sinks.weight": ("attn_sink", "sinks"),
    "indexer.wq_b.weight": ("indexer.wq_b.weight", "compressor.indexer.q_b_proj.weight"),
    "indexer.weights_proj.weight": (
        "indexer.weights_proj.weight",
        "compressor.indexer.scorer.weights_proj.weight",
    ),
    **{
        f"{ours}.{name}": (f"{ours}.{first}", f"{theirs}.{second}")
        for ours, theirs in (
            ("compressor", "compressor"),
            ("indexer.compressor", "compressor.indexer"),
        )
        for name, (first, second) in _COMPRESSOR.items()
    },
}
_STREAMS = {"weight": "fn", "bias": "base", "scale": "scale"}
_BLOCK = {
    **{f"attention.{n}": (f"attn.{a}", f"self_attn.{b}") for n, (a, b) in _ATTENTION.items()},
    "attention_norm.weight": ("attn_norm.weight", "input_layernorm.weight"),
    "ffn_norm.weight": ("ffn_norm.weight", "post_attention_layernorm.weight"),
    **{f"attention_streams.{n}": (f"hc_attn_{x}", f"attn_hc.{x}") for n, x in _STREAMS.items()},
    **{f"ffn_streams.{n}": (f"hc_ffn_{x}", f"ffn_hc.{x}") for n, x in _STREAMS.items()},
    "moe.router.gate.weight": ("ffn.gate.weight", "mlp.gate.weight"),
    "moe.router.expert_bias": ("ffn.gate.bias", "mlp.gate.e_score_correction_bias"),
    "moe.router.table": ("ffn.gate.tid2eid", "mlp.gate.tid2eid"),
    **{
        f"moe.shared_experts.{n}.weight": (
            f"ffn.shared_experts.{n}.weight",
            f"mlp.shared_experts.{x}.weight",
        )
        for n, x in names.PROJECTIONS.items()
    },
}


def _form(table: dict[str, tuple[str, str]], number: int) -> names.HFKeys:
    return {ours: (names.HFWeight(theirs[number]),) for ours, theirs in table.items()}


def keys(config: ModelConfig) -> names.HFKeys:
    """Names of each tensor. Routers with a table have no bias of the routing."""
    experts = {n: n for n in names.PROJECTIONS}
    files = _form(_BLOCK, 0) | names.renamed(
        "moe.experts.*", "ffn.experts.{expert}.*.weight", experts
    )
    # transformers writes one norm under another one's name.
    written = {**files, "attention.kv_norm.weight": (names.HFWeight("attn.norm.weight"),)}
    memory = _form(_BLOCK, 1) | names.stacks("mlp.experts")
    bias = "layers.{}.moe.router.expert_bias"
    return {
        **names.either(_form(_ENDS, 0), _form(_ENDS, 1)),
        **names.either(
            names.in_layers(files, theirs="layers.{layer}."),
            names.in_layers(written),
            names.in_layers(memory),
        ),
        **{bias.format(layer): () for layer in range(config.num_hash_layers)},
    }
