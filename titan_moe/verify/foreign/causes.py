"""Finds the mistake that makes one tensor of another: a factor, a lost expert, a lost sum."""

import math
from collections.abc import Mapping
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
    return worst([far / max(ours.norm().item(), least, 1e-300)]) if far else 0.0


def units(name: str, tensor: Tensor) -> Tensor:
    """Returns a stack's experts, or the one tensor."""
    return tensor if ".experts." in name else tensor[None]


def cause(name: str, theirs: Tensor, tried: Mapping[str, Tensor], scale: Scale) -> str:
    """Says what makes a gradient another, expert by expert; empty where it is right.

    Args:
        tried: under "" the right one, then what mistakes give, by their words.
    """
    said: dict[str, list[int]] = {}
    rows = zip(units(name, theirs), *(units(name, each) for each in tried.values()), strict=True)
    for number, (unit, *wanted) in enumerate(rows):
        says = _of_unit(unit, dict(zip(tried, wanted, strict=True)), scale)
        said.setdefault(says, []).append(number)
    if len(said) == 1:
        return says
    blocks = [block.tolist() for block in torch.arange(len(theirs)).chunk(scale.axes.get("ep", 1))]
    lines = []
    for says, experts in said.items():
        head, colon, tail = says.partition(": ")
        rank = f" (ep rank {blocks.index(experts)})" if experts in blocks else ""
        numbers = f"{', '.join(map(str, experts))}{rank}{colon and ', '}{tail}"
        whose = "one expert's gradient" if len(experts) == 1 else "several experts' gradients"
        lines += [f"{whose} {head}: {numbers}"] * bool(says)
    return "; ".join(lines)


def _of_unit(theirs: Tensor, tried: Mapping[str, Tensor], scale: Scale) -> str:
    if error(theirs, tried[""], scale.least) <= scale.bound:
        return ""
    if not theirs.any():
        return "zero: no gradient reaches it"
    for says, wanted in tried.items():
        square = wanted.square().sum().item()
        factor = (theirs * wanted).sum().item() / square if square else 0.0
        if not factor or error(theirs, factor * wanted, abs(factor) * scale.least) > scale.bound:
            continue
        words = "" if says and abs(factor - 1) < 1e-6 else scale.words(factor)
        if theirs.numel() > 1 or "direction" not in words:  # Two numbers always have the same one.
            return ", ".join(filter(None, (says, words)))
    return UNEXPLAINED


def norm_cause(theirs: float, gradients: Mapping[str, Tensor], scale: Scale) -> str:
    """Says which of a model's gradients a norm is of; empty where it is not known."""
    dense, blocks = 0.0, [0.0] * scale.axes.get("ep", 1)
    for name, gradient in gradients.items():
        if ".experts." in name:
            parts = gradient.chunk(len(blocks))
            blocks = [b + x.square().sum().item() for b, x in zip(blocks, parts, strict=True)]
        else:
            dense += gradient.square().sum().item()
    experts = sum(blocks)
    tried = {"the norm of all": dense + experts, "of no expert": dense, "of experts": experts}
    for rank, block in enumerate(blocks):
        says = f"a norm over one EP group: experts of ep rank {rank}, and all that is no expert"
        tried |= {says: dense + block}
    for axis, n in scale.axes.items():
        tried[f"what is no expert counted {n} times, over {axis}"] = n * dense + experts
        tried[f"experts counted {n} times, over {axis}"] = dense + n * experts
        tried[f"all counted {n} times, over {axis}"] = n * (dense + experts)
    within = max(scale.bound, 1e-6) * theirs
    return next((s for s, square in tried.items() if abs(theirs - square**0.5) <= within), "")


def of_update(
    added: Tensor, before: Tensor, gradient: Tensor, optimizer: AdamW, bound: float
) -> tuple[Tensor, str]:
    """Returns what AdamW's first step adds (arXiv 1711.05101, algorithm 2), and what makes it
    another; empty where it is right. Vectors may decay or not."""
    lr, decay = optimizer.lr, optimizer.weight_decay
    plain = -lr * gradient / (gradient.abs() + optimizer.eps)
    coupled = gradient + decay * before
    right = plain - lr * decay * before
    for says, tried in (
        ("", right),
        ("no weight decay" if before.ndim > 1 else "", plain),
        ("weight decay in the gradient", -lr * coupled / (coupled.abs() + optimizer.eps)),
        ("not updated" if gradient.any() else "", torch.zeros_like(before)),
    ):
        if error(added, tried) <= bound:
            return right if says else tried, says
    columns = torch.stack([plain.flatten() / lr, -before.flatten()], -1)
    fit = torch.linalg.lstsq(columns, added.flatten()[:, None]).solution[:, 0]
    if error(added.flatten(), columns @ fit) > bound:
        return right, "no step of AdamW with its gradient"
    rates = {"learning rate": (fit[0], lr), "weight decay": (fit[1] / fit[0], decay)}
    wrong = {name: pair for name, pair in rates.items() if not math.isclose(*pair, rel_tol=1e-3)}
    return right, ", ".join(f"{name} {a:.6g} in place of {b:g}" for name, (a, b) in wrong.items())
