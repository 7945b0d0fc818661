"""The table of token embeddings."""

import torch
from torch import nn


class Embedding(nn.Embedding):
    """nn.Embedding that draws no values: whoever trains fills all parameters, and to draw on the
    meta device imports torch's compiler."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__(vocab_size, dim, _weight=torch.empty(vocab_size, dim))
