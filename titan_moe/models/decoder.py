"""The decoder that all families share, as a plain single-device module.

Parameter names are torchtitan's: `layers.3.moe.experts.w1`, `layers.3.attention.wq.weight`, ...
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import titan_moe.models.compressed_attention  # noqa: F401  Registers its attention.
from titan_moe.models.attention import Attention, build_attention, plain_core
from titan_moe.models.config import ModelConfig
from titan_moe.models.feed_forward import FeedForward
from titan_moe.models.gated_delta_net import GatedDeltaNet
from titan_moe.models.hyper_connections import CollapsedNorm, HyperConnection, Residual
from titan_moe.models.indexer import Indexer, Selection, SharedSelection
from titan_moe.models.mamba2 import Mamba2
from titan_moe.models.mtp import MultiTokenPrediction, Sees
from titan_moe.models.output import Embedding, Output, norm_of
from titan_moe.models.recurrent_config import GatedDeltaConfig, Mamba2Config
from titan_moe.models.rope import Rope, Rotation, rope_key
from titan_moe.moe.layer import MoE
from titan_moe.ops.attention import AttentionCore
from titan_moe.ops.cross_entropy import IGNORE_INDEX
from titan_moe.ops.gated_delta import Recurrence, chunked_rule
from titan_moe.ops.varlen_attention import DocumentBounds
from titan_moe.runtime.regions import region

ADAPTER = ".adapter."
"""Every adapter's parameter has this in its name (models/lora.py)."""
_BIASES = ("b1", "b2", "b3")
_ENDS = ("tok_embeddings", "norm", "output")


class Block(nn.Module):
    """Pre-norm attention or recurrence, then a dense feed-forward, experts or both, each added to
    the stream. One of the two parts may be left out.

    `layer` is the block's number in the whole model, where multi-token prediction's come last.
    `sees` says which of the decoder's masks is the block's: "state", "nothing", or how far it
    attends. `turns` says which of its rotations is the block's; only attention has a use for it.
    """

    attention_norm: nn.RMSNorm
    ffn_norm: nn.RMSNorm
    scale: Tensor | None

    def __init__(
        self, layer: int, config: ModelConfig, core: AttentionCore, recurrence: Recurrence
    ) -> None:
        super().__init__()
        self.layer = layer
        mixer = config.mixer(layer)
        self.sees: Sees = "nothing"
        self.turns = rope_key(config.attention)
        self.attention: Attention | None = None
        dim, eps = config.dim, config.norm_eps
        if isinstance(mixer, GatedDeltaConfig):
            self.sees = "state"
            self.attention = GatedDeltaNet(dim, mixer, norm_eps=eps, core=recurrence)
        elif isinstance(mixer, Mamba2Config):
            self.sees = "state"
            self.attention = Mamba2(dim, mixer, norm_eps=eps, core=recurrence)
        elif mixer is not None:
            self.sees, self.turns = mixer.local, rope_key(mixer)
            self.attention = build_attention(mixer, config, core)
        make_norm = partial(norm_of(config), config.dim)
        connection = partial(HyperConnection, config) if config.streams > 1 else Residual
        post_norm = make_norm if config.sandwich_norms else nn.Identity
        has_experts, is_dense = config.is_moe_layer(layer), config.is_dense_layer(layer)
        if mixer is not None:
            self.attention_norm, self.post_attention_norm = make_norm(), post_norm()
            self.attention_streams = connection()
        if has_experts or is_dense:
            self.ffn_norm, self.post_ffn_norm = make_norm(), post_norm()
            self.ffn_streams = connection()
        self.register_buffer("scale", torch.ones(1) if config.layer_scales else None)
        self.moe: MoE | None = None
        self.feed_forward: FeedForward | None = None
        activation = config.activation.of(layer)
        if has_experts:
            assert config.moe is not None
            rows = config.vocab_size if layer < config.num_hash_layers else 0
            own = config.moe.activation.of(layer)
            moe = replace(config.moe, activation=own, table_rows=rows)
            shared, shared_dim = None, moe.num_shared_experts * moe.hidden_dim
            if shared_dim:
                shared = FeedForward(config.dim, shared_dim, activation, gated=moe.shared_gate)
            self.moe = MoE(config.dim, moe, shared)
        if is_dense:
            self.feed_forward = FeedForward(config.dim, config.hidden_dim, activation)
        self.moe_norm: nn.Module | None = None
        if has_experts and is_dense:
            self.moe_norm = make_norm()
            self.post_dense_norm, self.post_moe_norm = post_norm(), post_norm()

    def init_buffers(self) -> None:
        """Sets the factor of the stream to 1; also called after the meta device."""
        if self.scale is not None:
            self.scale.fill_(1)

    def forward(
        self,
        x_BSD: Tensor,
        rotation: Rotation,
        mask: Any,
        counted_BS: Tensor | None = None,
        ids_BS: Tensor | None = None,
    ) -> Tensor:
        """Returns the stream after the block; several streams lie beside each other in D.
        `counted_BS`, `ids_BS`: as `MoE.forward` takes them."""
        if (attention := self.attention) is not None:

            def attended(x_BSD: Tensor) -> Tensor:
                h_BSD = self.attention_norm(x_BSD)
                with region("attention"):
                    h_BSD = attention(h_BSD, rotation, mask, counted_BS)
                return self.post_attention_norm(h_BSD)

            x_BSD = self.attention_streams(x_BSD, attended)
        if self.moe is not None or self.feed_forward is not None:
            x_BSD = self.ffn_streams(x_BSD, partial(self._fed_forward, counted_BS, ids_BS))
        return x_BSD if self.scale is None else x_BSD * self.scale.to(x_BSD.dtype)

    def _fed_forward(
        self, counted_BS: Tensor | None, ids_BS: Tensor | None, x_BSD: Tensor
    ) -> Tensor:
        h_BSD = self.ffn_norm(x_BSD)
        if self.feed_forward is None:
            assert self.moe is not None
            return self.post_ffn_norm(self.moe(h_BSD, counted_BS, None, ids_BS))
        with region("feed_forward"):
            h_BSD = self.feed_forward(h_BSD)
        if self.moe is not None and self.moe_norm is not None:
            stream_BSD = None if self.moe.config.stream_eps is None else x_BSD
            routed_BSD = self.moe(self.moe_norm(x_BSD), counted_BS, stream_BSD)
            h_BSD = self.post_dense_norm(h_BSD) + self.post_moe_norm(routed_BSD)
        return self.post_ffn_norm(h_BSD)


class Decoder(nn.Module):
    """Token ids to logits or to the loss."""

    def __init__(
        self,
        config: ModelConfig,
        core: AttentionCore | None = None,
        recurrence: Recurrence | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.core = core or plain_core(config)
        self.recurrence = recurrence or Recurrence(chunked_rule, mask_documents=False)
        self.tok_embeddings = Embedding(config.vocab_size, config.dim)
        make_block = partial(Block, config=config, core=self.core, recurrence=self.recurrence)
        # A dict, not a list: a pipeline stage keeps the numbers of the layers that it holds.
        self.layers = nn.ModuleDict(
            {str(layer): make_block(layer) for layer in range(config.num_layers)}
        )
        one = config.streams == 1
        self.norm = norm_of(config)(config.dim) if one else CollapsedNorm(config)
        self.output = Output(config.dim, config.vocab_size, config.logit_cap)
        self.mtp: MultiTokenPrediction | None = None
        if config.num_mtp_layers:
            self.mtp = MultiTokenPrediction(config, make_block)
        turns = dict.fromkeys(block.turns for block in self.blocks().values())
        self.ropes = nn.ModuleList(Rope(*key) for key in turns)
        selection = Selection()
        for module in self.modules():
            if isinstance(module, Indexer | SharedSelection):
                module.selection = selection

    def forward(
        self,
        tokens_BS: Tensor,
        documents_BS: Tensor | None = None,
        positions_BS: Tensor | None = None,
        labels_BS: Tensor | None = None,
        ahead_tokens_BKS: Tensor | None = None,
        ahead_labels_BKS: Tensor | None = None,
        bounds: DocumentBounds | None = None,
        counted_BS: Tensor | None = None,
        ids_BS: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, S, V] in the compute type; with labels the sum of cross-entropies.

        The loss's backward is that of multi-token prediction's losses too.

        Args:
            tokens_BS: token ids.
            documents_BS: which document of its sequence each token belongs to, counted from 0;
                None: each sequence is one document.
            positions_BS: each token's position in its sequence; None: 0, 1, 2, ...
            labels_BS: the next token of each; IGNORE_INDEX where there is no target.
            ahead_tokens_BKS: what multi-token prediction trains on: the tokens 1, 2, ..., K
                positions on. Ignored in evaluation.
            ahead_labels_BKS: their labels.
            bounds: bounds of the documents, for an attention core that needs them on the host.
            counted_BS: as `MoE.forward` takes it.
            ids_BS: token ids, on a pipeline stage whose first argument is the stream.
        """
        if tokens_BS.ndim == 1:
            shape = list(tokens_BS.shape)
            raise ValueError(f"tokens have shape {shape}, not [batch, sequence]: pass tokens[None]")
        if documents_BS is None:
            documents_BS = torch.zeros_like(tokens_BS)
        if positions_BS is None:
            row_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
            positions_BS = row_S.expand_as(tokens_BS)
        ahead = ahead_tokens_BKS, ahead_labels_BKS
        sequences = tokens_BS, documents_BS, positions_BS
        hidden = self.hidden(*sequences, *ahead, bounds, counted_BS, ids_BS)
        if labels_BS is None or len(hidden) == 1:
            return self.output(hidden[0], labels_BS)
        assert self.mtp is not None and ahead_labels_BKS is not None
        return self.mtp.losses(hidden, labels_BS, ahead_labels_BKS, self.output)

    def hidden(
        self,
        tokens_BS: Tensor,
        documents_BS: Tensor,
        positions_BS: Tensor,
        ahead_tokens_BKS: Tensor | None = None,
        ahead_labels_BKS: Tensor | None = None,
        bounds: DocumentBounds | None = None,
        counted_BS: Tensor | None = None,
        ids_BS: Tensor | None = None,
    ) -> list[Tensor]:
        """Returns the output layer's inputs, each x_BSD: the decoder's, and in training, if there
        are tokens ahead, one for each depth of multi-token prediction. Given the labels ahead,
        experts of a depth count only its targets."""
        x_BSD, scale = self.tok_embeddings(tokens_BS), self.config.embedding_scale
        if scale != 1 and not isinstance(self.tok_embeddings, _PassOn):
            x_BSD = x_BSD * torch.tensor(scale, dtype=x_BSD.dtype).item()
        if self.config.streams > 1 and not isinstance(self.tok_embeddings, _PassOn):
            x_BSD = x_BSD.repeat(1, 1, self.config.streams)
        ids_BS = tokens_BS if ids_BS is None else ids_BS
        blocks = self.blocks().values()
        masks: dict[Sees, Any] = {"nothing": None}
        for sees in dict.fromkeys(block.sees for block in blocks):
            if sees == "state":
                masks[sees] = self.recurrence.mask(documents_BS)
            elif sees != "nothing":
                masks[sees] = self.core.mask(documents_BS, sees, bounds)
        turns = {block.turns for block in blocks}
        rotations = {
            rope.key: rope(positions_BS, x_BSD.dtype) for rope in self.ropes if rope.key in turns
        }
        for block in self.layers.values():
            context = rotations[block.turns], masks[block.sees]  # type: ignore[index]
            x_BSD = block(x_BSD, *context, counted_BS, ids_BS)
        x_BSD = self.norm(x_BSD)
        if self.mtp is None or not self.training or ahead_tokens_BKS is None:
            return [x_BSD]
        counted_BKS = None if ahead_labels_BKS is None else ahead_labels_BKS != IGNORE_INDEX
        return [x_BSD, *self.mtp(x_BSD, ahead_tokens_BKS, rotations, masks, counted_BKS)]

    def blocks(self) -> dict[str, Block]:
        """All blocks, multi-token prediction's last, by name: {"layers.0": Block, ...}."""
        blocks: dict[str, Any] = {f"layers.{n}": block for n, block in self.layers.items()}
        if self.mtp is not None:
            for depth, layer in self.mtp.layers.items():
                blocks[f"mtp.layers.{depth}.block"] = layer.block
        return blocks

    def moe_layers(self) -> dict[str, MoE]:
        """The MoE layers by the name of their block: {"layers.1": MoE, ...}."""
        return {n: block.moe for n, block in self.blocks().items() if block.moe is not None}


def keep_only(model: Decoder, names: Sequence[str]) -> Decoder:
    """Turn a whole decoder into the stage of these modules, in place; returns it.

    A missing embedding, norm or output layer becomes a module that passes its input on, so that the
    decoder's forward stays as it is. Layers keep their numbers. Rotations stay; multi-token
    prediction stays with the output layer.

    Args:
        names: some of `config.pipeline.module_names`.
    """
    known = {*_ENDS, *(f"layers.{layer}" for layer in model.layers)}
    assert set(names) <= known, f"no such modules: {sorted(set(names) - known)}"
    for end in _ENDS:
        if end not in names:
            model.set_submodule(end, _PassOn())
    for layer in list(model.layers):
        if f"layers.{layer}" not in names:
            del model.layers[layer]
    if "output" not in names:
        model.mtp = None
    return model


def stage_units(part: Decoder) -> list[list[nn.Module]]:
    """Returns a stage's FSDP units in forward order; a final norm stays with the root.

    There are two chains. The second is multi-token prediction, which an evaluation leaves out.
    """
    units = [part.tok_embeddings, *part.layers.children(), part.output]
    main = [unit for unit in units if not isinstance(unit, nn.Identity)]
    return [main] if part.mtp is None else [main, list(part.mtp.layers.children())]


class _PassOn(nn.Identity):
    """Replaces a module that a stage does not have; returns its first argument."""

    def forward(self, input: Tensor, *_: object) -> Tensor:
        return input


def is_bias(name: str) -> bool:
    """Returns whether a parameter is a bias of any shape: it starts at zero and does not decay."""
    last = name.rsplit(".", 1)[-1]
    return last.endswith("bias") or last in _BIASES or ".conv_bias." in name


def is_wide(name: str) -> bool:
    """Returns whether a parameter must be float32 or wider: a decay rate, which is an
    exponent, or what mixes residual streams, whose errors all layers would carry on."""
    return ".decay." in name or "streams." in name


def stored_in(name: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the type that stores a parameter, or a router's table, in a model of type `dtype`."""
    if name.endswith(".table"):
        return torch.int64
    return torch.promote_types(dtype, torch.float32) if is_wide(name) else dtype


def wide_units(part: Decoder) -> list[nn.Module]:
    """Returns the modules whose parameters are all `is_wide`; one stream alone has none."""
    modules = [m for name, m in part.named_modules() if name.endswith((".decay", "streams"))]
    return [module for module in modules if any(True for _ in module.parameters())]


def initial_std(name: str, config: ModelConfig) -> float | tuple[float, ...] | None:
    """Returns the standard deviation that draws a parameter. None: ones, as a norm's weight. Two
    numbers: the parameter is the logarithm of a uniform number between them. Three: its softplus is
    uniform in its logarithm between two of them, and the third at least."""
    parts, mixer = name.split("."), config.recurrent
    if "A_log" in parts:  # exp(A_log) is the rate at which a state decays.
        return 1.0 if isinstance(mixer, Mamba2Config) else 0.01, 16.0
    if "dt_bias" in parts and isinstance(mixer, Mamba2Config):
        return mixer.time_step_min, mixer.time_step_max, mixer.time_step_floor
    if {"dt_bias", "D", "out_norm", "scale"} & set(parts):
        return None
    if ADAPTER in name:
        return 0.0 if name.endswith("b") else config.init_std
    if is_bias(name):
        return 0.0
    if any(part.endswith("norm") for part in parts) and "streams" not in parts:
        return 0.0 if config.zero_centred_norms else None
    if {"wo", "w2", "out_proj", "from_experts"} & set(parts):
        return config.init_std / config.num_residuals**0.5
    return config.init_std


def move_off_meta(
    model: nn.Module, device: torch.device, *, parameter_device: torch.device
) -> None:
    """Allocate a meta-device model; buffers get their first values, parameters stay unset."""
    model.to_empty(device=parameter_device)
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        for name, buffer in buffers.items():
            setattr(module, name, buffer.to(device))
        if buffers:
            module.init_buffers()  # type: ignore[operator]
