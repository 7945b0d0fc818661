"""Dimensions of a decoder. No torch here: checks, planners and `--help` read it."""

import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import ClassVar, Literal

from titan_moe.models.recurrent_config import RecurrentConfig
from titan_moe.moe.config import MoEConfig
from titan_moe.ops.activation import SWIGLU, Activation
from titan_moe.ops.local_attention import LocalAttention


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071) as DeepSeek parametrises it."""

    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0
    truncate: bool = True
    """Round the border channels between kept and interpolated ones to whole channels."""


@dataclass(frozen=True)
class Llama3Scaling:
    """Frequency-band scaling of Llama 3.1 (its published reference code)."""

    factor: float
    original_max_seq_len: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions (arXiv 2104.09864)."""

    theta: float
    pairing: Literal["halves", "neighbours"] = "halves"
    """Channels that rotate together: i and i + C/2 (Hugging Face), or 2i and 2i + 1 (the paper)."""
    scaling: YarnScaling | Llama3Scaling | None = None
    share: float = 1.0
    """Share of the pairs that turn, the first ones; the others have frequency 0 (Gemma 4)."""


@dataclass(frozen=True)
class PositionTemperature:
    """Sharper attention far into a sequence, where layers have no positions (arXiv 2501.19399).

    The query at position p is scaled by 1 + scale * log(1 + floor((p + 1) / floor)).
    """

    scale: float
    floor: int


@dataclass(frozen=True)
class GQAConfig:
    """Grouped-query attention (arXiv 2305.13245)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    """None: no position has a part in attention (NoPE, arXiv 2305.19466)."""
    local: LocalAttention | None = None
    """Reach into the past; None: all of it."""
    value_dim: int | None = None
    """Channels of a value's head; None: head_dim."""
    qk_norm: Literal["none", "learned", "unweighted", "across_heads"] = "none"
    """RMS norm of each query and key head: with a weight before the rotation (Qwen3), or without
    one after it, in layers that rotate (Llama 4). "across_heads": of all query heads together and
    all key heads together, with a weight before the rotation (MiniMax-M2)."""
    v_norm: bool = False
    """RMS norm of each value head, without a weight (Gemma 4)."""
    shares_kv: bool = False
    """Values are the keys before their norm and rotation, without a projection (Gemma 4)."""
    value_scale: float = 1.0
    """Factor of the values (MiMo-V2)."""
    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(head_dim)."""
    bias: bool = False
    """All four projections have a bias: Hugging Face's `attention_bias`."""
    output_bias: bool = True
    """`bias` includes the output projection's. False in GLM-4.5."""
    partial_rotary_factor: float = 1.0
    """Share of a head's channels that positions rotate: the first ones."""
    gate: Literal["none", "channels", "heads"] = "none"
    """A sigmoid multiplies the heads' output: of a number for each channel, which the query
    projection also makes (Qwen3-Next), or of one for each head (Step-3.7)."""
    sinks: bool = False
    """A learned logit per head joins each softmax and takes its share away (gpt-oss)."""
    temperature: PositionTemperature | None = None
    """Temperature of attention in layers without rotary positions. Positions are counted in the
    document where documents are masked."""

    @property
    def rope_dim(self) -> int:
        """Channels of a head that positions rotate; 0 without positions."""
        return int(self.head_dim * self.partial_rotary_factor) if self.rope else 0

    @property
    def qk_dim(self) -> int:
        """Channels of a query's and a key's head."""
        return self.head_dim

    @property
    def v_dim(self) -> int:
        """Channels of a value's head."""
        return self.value_dim or self.head_dim


@dataclass(frozen=True)
class IndexerConfig:
    """Dimensions of the indexer of DeepSeek sparse attention (arXiv 2512.02556)."""

    num_heads: int
    head_dim: int
    top_k: int
    """Keys that a query attends to."""
    pairing: Literal["halves", "neighbours"] = "halves"
    """Channels that rotate together, the first rope_dim of a head; not always attention's own."""
    warm_up: bool = False
    """Attend to all keys: the indexer alone is trained, on the whole attention."""
    shared_in: tuple[int, ...] = ()
    """Layers without an indexer (arXiv 2603.12201): they see the keys that were selected last."""
    shares: bool = False
    """True in each of these layers; `ModelConfig.mixer` sets it."""


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1)."""

    num_heads: int
    q_rank: int | None
    """Rank of the query's latent; None projects queries directly."""
    kv_rank: int
    nope_dim: int
    """Channels of a head without position."""
    rope_dim: int
    """Channels of a head with position; the key's are shared by all heads."""
    v_dim: int
    rope: RopeConfig | None
    """None: no position has a part in attention; the rope_dim channels are as the others."""
    bias: bool = False
    """The down-projections and the output projection have a bias: `attention_bias`."""
    norm_eps: float = 1e-6
    """Epsilon of the latents' norms. The published code uses it whatever `ModelConfig` says."""
    indexer: IndexerConfig | None = None
    """Reads the query's latent. None: attention to the whole past."""

    sinks: ClassVar[bool] = False
    local: ClassVar[LocalAttention | None] = None

    @property
    def num_kv_heads(self) -> int:
        """Each head has keys and values of its own, made from the shared latent."""
        return self.num_heads

    @property
    def qk_dim(self) -> int:
        """Channels of a query's and a key's head."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True)
class CompressedConfig:
    """Attention of DeepSeek-V4: to a window of tokens, and to blocks of tokens that are compressed
    into one key each. There is one head of keys, which are the values too."""

    num_heads: int
    head_dim: int
    query_rank: int
    """Rank of the query's latent."""
    rope_dim: int
    """Channels that positions rotate: the last ones of a head."""
    rope: RopeConfig | None
    local: LocalAttention | None
    output_groups: int
    """Equal groups of heads, each of which has a low-rank output projection of its own."""
    output_rank: int
    """Rank of a group's projection."""
    ratio: int = 0
    """Tokens of a block, counted from where a document begins. 0: the window alone."""
    indexer: IndexerConfig | None = None
    """Selects the blocks that a query sees. Blocks overlap then: each is compressed from its own
    tokens and those of the block before. None: a query sees all blocks that ended before it."""

    num_kv_heads: ClassVar[int] = 1
    sinks: ClassVar[bool] = True

    @property
    def qk_dim(self) -> int:
        """Channels of a query's, a key's and a value's head."""
        return self.head_dim

    v_dim = qk_dim


LOSS_CHUNKS = {"cpu": 1024, "cuda": 4096}
"""Device -> tokens whose logits exist at once, where training.loss_chunk_size is left out."""

AttentionConfig = GQAConfig | MLAConfig | CompressedConfig
"""The variants. A further one has num_heads, num_kv_heads, rope, rope_dim, qk_dim, v_dim, local and
sinks too, its module in models/attention.py and its counts in models/stats.py."""
TokenMixer = AttentionConfig | RecurrentConfig
"""Dimensions of the part of a layer that mixes tokens."""


@dataclass(frozen=True)
class ModelConfig:
    """One flavor of one family."""

    vocab_size: int
    dim: int
    num_layers: int
    attention: AttentionConfig
    """Attention of layers that see the whole past, multi-token prediction's among them."""
    hidden_dim: int
    """Hidden dim of the dense feed-forward layers."""
    moe: MoEConfig | None
    dense_beside_experts: bool = False
    """Layers with experts have a dense feed-forward too, and add up the two outputs (Gemma 4)."""
    activation: Activation = SWIGLU
    """Activation of the dense feed-forward layers, and of the shared experts."""
    num_dense_layers: int = 0
    """The first layers whose feed-forward is dense although `moe` is set."""
    moe_every: int = 1
    """Interval of MoE layers: moe_every - 1, 2 * moe_every - 1, ..., unless `num_dense_layers`
    makes them dense."""
    near: AttentionConfig | None = None
    """Attention of layers that see the near past alone."""
    sparse: AttentionConfig | None = None
    """Attention of layers that see selected keys of the past, beside layers that see all."""
    recurrent: RecurrentConfig | None = None
    pattern: str = "a"
    """The layers' kinds, as often as there are layers: "a" has `attention`, "n" `near`, "s"
    `sparse`, "r" `recurrent`, and "-" none of them. So "nna" is of layers of which each third
    sees the whole past."""
    ffn_pattern: str = "f"
    """The layers' feed-forwards, as often as there are layers: "f" has experts or is dense, as
    `moe_every` and `num_dense_layers` say, "d" is dense, and "-" has none (Nemotron-H)."""
    sandwich_norms: bool = False
    """Attention and feed-forward are followed by norms too, before they are added to the stream;
    where a dense feed-forward and experts are beside each other, each of the two is, first."""
    layer_scales: bool = False
    """Each layer multiplies the stream by a number that a checkpoint holds and that never trains.
    """
    embedding_scale: float = 1.0
    """Factor of the embedding's rows, rounded to their type."""
    logit_cap: float | None = None
    """C of the output's C tanh(logits / C); None: the logits as they are (arXiv 2408.00118)."""
    num_hash_layers: int = 0
    """The first layers, whose experts depend on the token's id alone, by a table."""
    streams: int = 1
    """Residual streams of a token; more than one are mixed around each sublayer by
    hyper-connections (arXiv 2512.24880)."""
    sinkhorn_steps: int = 20
    """Steps that make the streams' mixing matrices doubly stochastic."""
    streams_eps: float = 1e-6
    """Epsilon of these steps, and least share of a stream in a sublayer's input."""
    zero_centred_norms: bool = False
    """Norms multiply by 1 + weight, except the norm of a recurrent layer's output."""
    tied_embeddings: bool = False
    """The output layer's weight is the embedding's."""
    num_mtp_layers: int = 0
    """Layers that predict further tokens in training (arXiv 2412.19437, section 2.2)."""
    mtp_loss_weight: float = 0.3
    """Weight of the mean multi-token prediction loss; DeepSeek-V3 trained with 0.3, then 0.1."""
    max_seq_len: int = 4096
    norm_eps: float = 1e-6
    init_std: float = 0.02
    """Standard deviation of the initial weights; projections back into the residual stream divide
    it by the square root of their number."""

    def is_moe_layer(self, layer: int) -> bool:
        """Returns whether a layer has experts, multi-token prediction's included: they follow the
        last."""
        beyond, layer = layer >= self.num_layers, min(layer, self.num_layers - 1)
        interleaved = (layer + 1) % self.moe_every == 0
        named = beyond or self.ffn_pattern[layer % len(self.ffn_pattern)] == "f"
        return self.moe is not None and named and layer >= self.num_dense_layers and interleaved

    def is_dense_layer(self, layer: int) -> bool:
        """Returns whether a layer has a dense feed-forward, maybe beside experts."""
        beyond = layer >= self.num_layers
        named = beyond or self.ffn_pattern[layer % len(self.ffn_pattern)] != "-"
        return named and (self.dense_beside_experts or not self.is_moe_layer(layer))

    @cached_property
    def has_dense(self) -> bool:
        """Returns whether some layer has a dense feed-forward."""
        return any(map(self.is_dense_layer, range(self.num_layers)))

    @cached_property
    def num_residuals(self) -> int:
        """Parts of the layers that are added to the residual stream: two of a usual layer."""
        layers = range(self.num_layers)
        feed_forwards = (self.is_moe_layer(n) or self.is_dense_layer(n) for n in layers)
        return sum(self.mixer(n) is not None for n in layers) + sum(feed_forwards)

    def mixer(self, layer: int) -> TokenMixer | None:
        """Returns the attention or recurrence of a layer, None without any. Layers of multi-token
        prediction, whose numbers follow the last one's, see the whole past."""
        kinds = {"a": self.attention, "n": self.near, "s": self.sparse, "r": self.recurrent}
        letter = "a" if layer >= self.num_layers else self.pattern[layer % len(self.pattern)]
        if letter == "-":
            return None
        mixer = kinds[letter]
        assert mixer is not None, f"the pattern {self.pattern!r} names what is not given"
        if isinstance(mixer, MLAConfig) and (own := mixer.indexer) is not None:
            return replace(mixer, indexer=replace(own, shares=layer in own.shared_in))
        return mixer

    @property
    def row_dim(self) -> int:
        """Channels of the rows that routed experts are given."""
        return (self.moe and self.moe.latent_dim) or self.dim

    @cached_property
    def mixers(self) -> frozenset[TokenMixer]:
        """Returns the different mixers of all layers."""
        mixers = map(self.mixer, range(self.num_layers + self.num_mtp_layers))
        return frozenset(mixer for mixer in mixers if mixer is not None)

    @cached_property
    def attentions(self) -> tuple[AttentionConfig, ...]:
        """Returns the different attentions of all layers, in an order that is always the same."""
        attentions = [each for each in self.mixers if not isinstance(each, RecurrentConfig)]
        return tuple(sorted(attentions, key=repr))

    def recurs(self, layer: int) -> bool:
        """Returns whether a layer has a recurrent state."""
        return self.recurrent is not None and self.mixer(layer) is self.recurrent

    @property
    def indexer(self) -> IndexerConfig | None:
        """The indexer of each layer's attention; None: attention is not sparse."""
        attention = self.attention
        return attention.indexer if isinstance(attention, MLAConfig) else None

    @property
    def has_temperature(self) -> bool:
        """True if attention depends on positions themselves, not only on their differences."""
        tempered = (isinstance(each, GQAConfig) and each.temperature for each in self.attentions)
        return isinstance(self.attention, CompressedConfig) or any(tempered)


def tied_weights(config: ModelConfig) -> list[list[str]]:
    """Returns groups of names: the copies of one tied parameter, its own name first.

    The copies let nothing but the step know of a tie: each is sharded and gathered where it is
    used, on any pipeline stage, and the step sums their gradients. The price is a second (sharded)
    embedding with its optimizer state.
    """
    copies = ["output.weight"] * config.tied_embeddings
    copies += [f"mtp.layers.{k}.tok_embeddings.weight" for k in range(config.num_mtp_layers)]
    return [["tok_embeddings.weight", *copies]] if copies else []


def moe_layer_names(config: ModelConfig) -> list[str]:
    """Returns the names of all MoE layers in order, as in `decoder.Decoder.moe_layers`."""
    layers, mtp = range(config.num_layers), range(config.num_mtp_layers)
    names = [f"layers.{layer}" for layer in layers if config.is_moe_layer(layer)]
    beyond = config.is_moe_layer(config.num_layers)
    return names + [f"mtp.layers.{depth}.block" for depth in mtp if beyond]


def matches(name: str, pattern: str) -> bool:
    """Returns whether a pattern names a parameter or module: it fits the whole name, as in a shell,
    or is a part of it from dot to dot. "router" names layers.3.moe.router.gate.weight. "layers.0"
    is no part of mtp.layers.0.eh_proj.weight: only "mtp.layers.0" begins there."""
    own = re.sub(r"^mtp\.layers\.\d+\.", "", name)
    begins = f"{name}.".startswith(f"{pattern}.")
    return begins or fnmatchcase(name, pattern) or f".{pattern}." in f".{own}."
