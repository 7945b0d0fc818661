"""Finds the mistake that makes one tensor of another: a factor, a lost expert, a lost sum."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from titan_moe.verify.foreign.folder import AdamW
from titan_moe.verify.gradients.compare import fingerprint, worst
from titan_moe.verify.localize.difference import ROUNDING

VAGUE = "direction"
UNEXPLAINED, SAME = f"of another {VAGUE}", f"of the same {VAGUE}"


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
        within = max(self.bound / 10, 1e-6)
        for says, value in self.named.items():
            if abs(factor / value - 1) < within:
                return says
        known = {2.0: "doubled: ", 0.5: "halved: "}.get(round(factor, 6), "")
        found = fingerprint(factor, self.axes, within).removeprefix(": ")
        return known + found if found else f"{SAME}: {factor:.9g} times"


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
    for number, unit in enumerate(units(name, theirs)):
        of_unit = {says: units(name, each)[number] for says, each in tried.items()}
        said.setdefault(says := _of_unit(unit, of_unit, scale), []).append(number)
    if len(said) == 1:
        return says
    blocks = [
        block.tolist() for block in torch.arange(len(theirs)).tensor_split(scale.axes.get("ep", 1))
    ]
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
    vague = ""
    for says, wanted in tried.items():
        square = wanted.square().sum().item()
        factor = (theirs * wanted).sum().item() / square if square else 0.0
        far = error(theirs, factor * wanted, abs(factor) * scale.least)
        is_one = abs(factor - 1) <= max(scale.bound, 1e-6 * bool(says))
        if not factor or far > scale.bound or (is_one and not says):
            continue
        words = "" if is_one else scale.words(factor)
        says = ", ".join(filter(None, (says, words)))
        if SAME not in words:
            return says
        vague = vague or says * (theirs.numel() > 1)  # Two numbers always have the same one.
    return vague or UNEXPLAINED


def norm_cause(theirs: float, gradients: Mapping[str, Tensor], scale: Scale) -> str:
    """Says which of a model's gradients a norm is of; empty where it is not known."""
    squares = {name: gradient.square().sum().item() for name, gradient in gradients.items()}
    stacks = [gradient for name, gradient in gradients.items() if ".experts." in name]
    experts = sum(square for name, square in squares.items() if ".experts." in name)
    dense = sum(squares.values()) - experts
    tried = {"the norm of all": dense + experts, "of no expert": dense, "of experts": experts}
    for rank in range(scale.axes.get("ep", 1)):
        blocks = [stack.tensor_split(scale.axes.get("ep", 1))[rank] for stack in stacks]
        says = f"a norm over one EP group: experts of ep rank {rank}, and all that is no expert"
        tried[says] = dense + sum(block.square().sum().item() for block in blocks)
    for axis, size in scale.axes.items():
        for factor, says in ((size, f"{size}"), (1 / size, f"1/{size}")):
            tried[f"squares of experts times {says}, over {axis}"] = dense + factor * experts
            tried[f"squares but experts' times {says}, over {axis}"] = factor * dense + experts
            tried[f"all squares times {says}, over {axis}"] = factor * (dense + experts)
    within = max(scale.bound, 1e-6) * theirs
    return next((s for s, square in tried.items() if abs(theirs - square**0.5) <= within), "")


def of_update(
    added: Tensor, before: Tensor, gradient: Tensor, optimizer: AdamW, dtype: str
) -> tuple[Tensor, str]:
    """Returns what AdamW's first step adds (arXiv 1711.05101, algorithm 2), and what makes it
    another; empty where it is right. Vectors may decay or not."""
    lr, decay = optimizer.lr, optimizer.weight_decay
    plain = gradient / (gradient.abs() + optimizer.eps)
    right = -lr * (plain + decay * before) * (gradient.any() or added.any())
    digits = torch.finfo(getattr(torch, dtype)).eps  # A parameter cannot show a smaller update.
    resolved = digits * before.norm().item() / max(right.norm().item(), 1e-300)
    bound = max(ROUNDING[dtype].update, resolved)
    if error(added, right) <= bound:
        return right, ""
    if not added.any():
        return right, "not updated"
    columns = -torch.stack([plain.flatten(), before.flatten()], -1)
    fit = torch.linalg.lstsq(columns, added.flatten()[:, None]).solution[:, 0]
    if error(added.flatten(), columns @ fit) > bound:
        return right, "no step of AdamW with its gradient"
    their_lr, their_decay = fit[0].item(), round((fit[1] / fit[0]).item(), 7) + 0.0  # No -0.
    found = {"learning rate": (their_lr, lr), "weight decay": (their_decay, decay)}
    if before.ndim == 1 and not their_decay:
        right = -lr * plain
        del found["weight decay"]
    wrong = {name: pair for name, pair in found.items() if not math.isclose(*pair, rel_tol=1e-3)}
    return right, ", ".join(f"{n} {a:.4g} in place of {b:.4g}" for n, (a, b) in wrong.items())
