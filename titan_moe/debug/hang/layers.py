"""Layers tell the position when a rank enters and leaves them, forward and backward."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn

from titan_moe.models.decoder import Decoder
from titan_moe.runtime.position import POSITION


def mark_layers(parts: Iterable[nn.Module]) -> None:
    """Hook the blocks of decoders, by their names in the whole model. Changes no value."""
    for part in parts:
        assert isinstance(part, Decoder)
        for name, block in part.blocks().items():
            words = name.replace(".block", "").replace("layers.", "layer ").replace(".", " ")
            # First of the block's hooks: what FSDP gathers for it is the layer's own.
            block.register_forward_pre_hook(partial(_enter, words), prepend=True)
            block.register_forward_hook(partial(_leave, words))
        if not isinstance(part.tok_embeddings, nn.Identity):
            part.tok_embeddings.register_forward_hook(partial(_leave, "the embedding"))


def _enter(layer: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
    POSITION.enter_layer(layer)


def _leave(layer: str, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
    """The layer's backward begins when the gradient of its output is made."""
    POSITION.enter_layer("")
    if output.requires_grad:
        output.register_hook(partial(_enter_backward, layer))


def _enter_backward(layer: str, gradient: Tensor) -> None:
    POSITION.enter_layer(f"{layer}'s backward")
