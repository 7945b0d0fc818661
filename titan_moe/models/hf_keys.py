"""How a family's weights are named and laid out in Hugging Face folders, as data. No torch.

A family's `hf_keys.py` maps our names to theirs. On both sides `{layer}` stands for a number; theirs
counts multi-token prediction layers on after the others, ours from 0 under `mtp.layers`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class HFWeight:
    """One way in which a tensor of ours is stored."""

    name: str
    """With {layer}; with {expert} where each expert of a stack has a tensor of its own. Without it a
    stack is stored whole, experts first, like ours."""
    transposed: bool = False
    """Their last two dims are ours swapped."""
    part: Literal["whole", "first half", "second half", "even", "odd"] = "whole"
    """Which rows of theirs are ours, where gate and up projections share a tensor: of a matrix, its
    second last dim in our order; of a bias, its last."""


# Our name -> the ways it may be stored; the first is how it is published, and exported.
HFKeys = Mapping[str, tuple[HFWeight, ...]]
