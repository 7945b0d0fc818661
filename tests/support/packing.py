"""Whole models with initial weights; packed documents against each document alone."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from titan_moe.distributed.init_weights import fill_initial_weights
from titan_moe.models.config import ModelConfig
from titan_moe.models.decoder import Decoder, initial_std


def filled(config: ModelConfig, *cores: Any) -> Decoder:
    """Returns a model with its initial weights, in float64."""
    model = Decoder(config, *cores)
    fill_initial_weights(model, 0, partial(initial_std, config=config))
    return model.double()


def gradients(model: Decoder) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def train_packed_and_alone(packed: Decoder, alone: Decoder, lengths: Sequence[int]) -> None:
    """Trains a model on documents in one row, and an equal one on each of them by itself.

    Raises AssertionError if logits or gradients differ.
    """
    torch.manual_seed(0)
    tokens = torch.randint(0, packed.config.vocab_size, (1, sum(lengths)))
    number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    logits = packed(tokens, number, positions)
    upstream = torch.randn_like(logits)
    logits.backward(upstream)
    rows = (each.split(lengths, 1) for each in (tokens, logits, upstream))
    for document, wanted, gradient in zip(*rows, strict=True):
        found = alone(document)
        found.backward(gradient)
        assert (found - wanted).norm() <= 1e-11 * wanted.norm()
    ours, theirs = gradients(packed), gradients(alone)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 1e-11 * gradient.norm(), name
