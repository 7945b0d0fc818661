"""Finds the mistake that makes one tensor of another: a factor, a lost expert, a lost sum."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from titan_moe.verify.foreign.folder import AdamW
from titan_moe.verify.gradients.compare import fingerprint, worst

UNEXPLAINED = "of another direction"


class Scale(NamedTuple):
    """The numbers of a step that errors are measured by, and that a wrong factor may be."""

    bound: float
    """The largest relative error that counts as equal."""
    least: float
    """The least norm that a difference is divided by."""
    axes: Mapping[str, int]
    """The layout's axes of more than one rank, and all of them together."""
    named: Mapping[str, float]
    """Further factors, by what they say."""

    def words(self, factor: float) -> str:
        """Says which number a factor is."""
        within = max(self.bound, 1e-6)
        for says, value in self.named.items():
            if abs(factor / value - 1) < within:
                return says
        known = {2.0: "doubled: ", 0.5: "halved: "}.get(round(factor, 6), "")
        found = fingerprint(factor, self.axes, within).removeprefix(": ")
        return known + found if found else f"of the same direction: {factor:.6g} times"


def error(theirs: Tensor, ours: Tensor, least: float = 0.0) -> float:
    """Returns the norm of the difference over that of ours, or over `least`."""
    far = (theirs - ours).norm().item()
    return worst([far / max(ours.norm().item(), least)]) if far else 0.0


def units(name: str, tensor: Tensor) -> Tensor:
    """Returns a stack's experts, or the one tensor."""
    return tensor if ".experts." in name else tensor[None]


def cause(
    name: str,
    theirs: Tensor,
    ours: Tensor,
    scale: Scale,
    mistakes: Sequence[tuple[str, Tensor]] = (),
) -> str:
    """Says what makes a gradient of ours theirs, expert by expert; empty where they agree.

    Args:
        mistakes: in words, and the gradient that each gives instead of ours.
    """
    said: dict[str, list[int]] = {}
    tried = [("", units(name, ours)), *((says, units(name, each)) for says, each in mistakes)]
    for number, unit in enumerate(units(name, theirs)):
        found = _of_unit(unit, [(says, each[number]) for says, each in tried], scale)
        said.setdefault(found, []).append(number)
    if len(said) == 1:
        return found
    blocks = [block.tolist() for block in torch.arange(len(ours)).chunk(scale.axes.get("ep", 1))]
    lines = []
    for found, experts in said.items():
        head, _, tail = found.partition(": ")
        numbers = ", ".join(map(str, experts))
        if experts in blocks:
            numbers += f" (ep rank {blocks.index(experts)})"
        whose = "one expert's gradient" if len(experts) == 1 else "several experts' gradients"
        lines += [f"{whose} {head}: {numbers}{tail and ', '}{tail}"] * bool(found)
    return "; ".join(lines)


def _of_unit(theirs: Tensor, tried: Sequence[tuple[str, Tensor]], scale: Scale) -> str:
    if error(theirs, tried[0][1], scale.least) <= scale.bound:
        return ""
    if not theirs.any():
        return "zero: no gradient reaches it"
    for says, wanted in tried:
        square = wanted.square().sum().item()
        factor = (theirs * wanted).sum().item() / square if square else 0.0
        least = abs(factor) * scale.least
        if factor and error(theirs, factor * wanted, least) <= scale.bound:
            if says and abs(factor - 1) <= max(scale.bound, 1e-6):
                return says
            words = scale.words(factor)
            if theirs.numel() > 1 or "direction" not in words:  # Numbers always have the same.
                return f"{says}, {words}" if says else words
    return UNEXPLAINED


def norm_cause(theirs: float, gradients: Mapping[str, Tensor], scale: Scale) -> str:
    """Says which of a model's gradients a norm is of; empty where it is not known."""
    dense, blocks = 0.0, [0.0] * scale.axes.get("ep", 1)
    for name, gradient in gradients.items():
        if ".experts." not in name:
            dense += gradient.square().sum().item()
            continue
        for rank, block in enumerate(gradient.chunk(len(blocks))):
            blocks[rank] += block.square().sum().item()
    for says, square in _norms(dense, blocks, scale.axes):
        if abs(theirs - math.sqrt(square)) <= max(scale.bound, 1e-6) * theirs:
            return says
    return ""


def _norms(
    dense: float, blocks: Sequence[float], axes: Mapping[str, int]
) -> Iterator[tuple[str, float]]:
    experts = sum(blocks)
    yield "the norm of all gradients", dense + experts
    for rank, block in enumerate(blocks if len(blocks) > 1 else []):
        yield f"a norm over one EP group, experts of ep rank {rank} and what is none", dense + block
    yield "a norm without experts", dense
    yield "a norm of experts alone", experts
    for axis, size in axes.items():
        yield f"gradients but experts counted {size} times, over {axis}", size * dense + experts
        yield f"experts counted {size} times, over {axis}", dense + size * experts
        yield f"all counted {size} times, over {axis}", size * (dense + experts)


def adamw(gradient: Tensor, before: Tensor, optimizer: AdamW, decay: float) -> Tensor:
    """Returns what the first step of AdamW adds (arXiv 1711.05101, algorithm 2)."""
    return -optimizer.lr * (gradient / (gradient.abs() + optimizer.eps) + decay * before)


def update_cause(
    added: Tensor, before: Tensor, gradient: Tensor, optimizer: AdamW, bound: float
) -> str:
    """Says what makes a first step of AdamW another; empty where it is right. Vectors may decay or
    not."""
    lr, decay = optimizer.lr, optimizer.weight_decay
    plain = adamw(gradient, before, optimizer, 0.0)
    for says, tried in (
        ("", plain - lr * decay * before),
        ("no weight decay" if before.ndim > 1 else "", plain),
        ("weight decay in the gradient", adamw(gradient + decay * before, before, optimizer, 0.0)),
        ("not updated" if gradient.any() else "", torch.zeros_like(before)),
    ):
        if error(added, tried) <= bound:
            return says
    columns = torch.stack([plain.flatten() / lr, -before.flatten()], -1)
    fit = torch.linalg.lstsq(columns, added.flatten()[:, None]).solution[:, 0]
    if error(added.flatten(), columns @ fit) > bound:
        return "no step of AdamW with its gradient"
    rates = {"learning rate": (fit[0], lr), "weight decay": (fit[1] / fit[0], decay)}
    wrong = {
        name: pair
        for name, pair in rates.items()
        if not 0.999 * pair[1] < pair[0] < 1.001 * pair[1]
    }
    return ", ".join(f"{name} {a:.6g} in place of {b:g}" for name, (a, b) in wrong.items())
