"""Lays one step of another program beside ours, computed by one plain process."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from titan_moe.checkpoint.hf.read import load_alone
from titan_moe.data.batch import IGNORE_INDEX
from titan_moe.models.hf import model_of
from titan_moe.verify.foreign.causes import (
    UNEXPLAINED,
    Scale,
    adamw,
    cause,
    error,
    norm_cause,
    units,
    update_cause,
)
from titan_moe.verify.foreign.folder import ForeignStep, read_step
from titan_moe.verify.gradients.compare import first_few, worst
from titan_moe.verify.localize.difference import ROUNDING
from titan_moe.verify.parity.check import joined_gradients

_WEAK = 1e3
"""A difference is divided by a tensor's own norm, but at least by the usual norm times the bound
times this: a gradient that is zero in theory holds rounding errors."""


class TensorVerdict(NamedTuple):
    """The comparison of one tensor."""

    name: str
    theirs: str
    """Its Hugging Face name."""
    ratio: float
    """Norm of theirs over that of ours."""
    angle: float
    """Degrees between them."""
    error: float
    """Norm of the difference over that of ours; of a stack, the largest of an expert."""
    cause: str
    """The mistake in words; empty where they agree."""


class Part(NamedTuple):
    """The verdict on one part of a step: its loss, gradients, norm, ..."""

    name: str
    agrees: bool
    says: str
    tensors: Sequence[TensorVerdict] = ()

    def lines(self) -> list[str]:
        """Returns the verdict, and the tensors that differ, by cause."""
        by_cause: dict[str, list[str]] = {}
        for each in self.tensors:
            figures = f"ratio {each.ratio:.6g}, angle {each.angle:.3g}°, error {each.error:.1e}"
            line = f"    {each.name} ({each.theirs}): {figures}"
            by_cause.setdefault(each.cause, []).append(line)
        by_cause.pop("", None)
        wrong = [line for says, few in by_cause.items() for line in (f"  {says}:", *first_few(few))]
        return [f"{self.name:<11}{self.says}", *wrong]


def judge(folder: Path, hf_folder: Path, dtype: torch.dtype) -> list[Part]:
    """Compares the step in a folder with ours from the same weights. Raises ConfigError or RunError
    for what cannot be compared, before anything runs."""
    model = model_of(hf_folder)
    step = read_step(folder, replace(model, config=replace(model.config, num_mtp_layers=0)))
    ours, facts = _Ours(step, hf_folder, dtype), step.facts
    sizes = {
        a: int(n) for a, _, n in (x.partition("=") for x in facts.layout.split(",")) if n > "1"
    }
    sets = [names for n in range(1, len(sizes) + 1) for names in combinations(sizes, n)]
    axes = {" x ".join(names): math.prod(sizes[name] for name in names) for names in sets}
    bound = max(ROUNDING[each].bound for each in (facts.dtype, str(dtype).removeprefix("torch.")))
    clip = min(1.0, (facts.max_norm or math.inf) / ours.norm)
    targets, positions = facts.num_targets, step.tokens_BS.numel()
    named = {
        f"a sum over {targets} targets: not their mean": float(targets),
        f"of another divisor: {positions} positions, not {targets} targets": targets / positions,
        f"clipped: written after clipping, times {clip:.6g}": clip,
        "of the opposite sign": -1.0,
    }
    usual = ours.norm / math.sqrt(len(ours.gradients))
    named = {says: factor for says, factor in named.items() if factor != 1}
    scale = Scale(bound, min(1.0, _WEAK * bound) * usual, axes, named)
    how = f"{facts.program} {facts.version}, {facts.layout or 'one process'}, {facts.dtype}"
    parts = [Part("step", True, f"{how}; equal means up to {bound:.0e}, beside {dtype}")]
    parts += [_number("loss", facts.loss, ours.loss, scale), _gradients(step, ours, scale)]
    if facts.grad_norm is not None:
        parts += _norm(facts.grad_norm, step, ours, scale)
    return parts + _update(step, ours) * bool(step.updated) + _layers(step, ours, bound)


class _Ours:
    """Our loss, gradients and outputs of layers of the same step."""

    def __init__(self, step: ForeignStep, folder: Path, dtype: torch.dtype) -> None:
        self.model = load_alone(folder, dtype=dtype, device=torch.device("cpu")).model
        self._step, self.outputs = step, dict[str, Tensor]()
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(".indexer." not in name)
        self.parameters = {n: p.detach().double() for n, p in self.model.named_parameters()}
        for name in step.activations:
            self.model.blocks()[name].register_forward_hook(partial(self._keep, name))
        self.loss, self.gradients = self._of_rows(slice(None))
        self.norm = math.hypot(*(g.norm().item() for g in self.gradients.values()))

    def _keep(self, name: str, module: nn.Module, args: object, x_BSD: Tensor) -> None:
        self.outputs.setdefault(name, x_BSD.detach().double())

    def _of_rows(self, rows: slice) -> tuple[float, dict[str, Tensor]]:
        """Returns the part of some sequences in the loss and in its gradients."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        loss = self.model(self._step.tokens_BS[rows], labels_BS=self._step.labels_BS[rows])
        loss = loss / self._step.facts.num_targets
        loss.backward()
        gradients = joined_gradients(self.model, self.model.config).items()
        return loss.item(), {name: gradient.double() for name, gradient in gradients}

    def mistakes(
        self, sizes: set[int], detached: Sequence[str]
    ) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yields mistakes in words, and the gradients that each gives.

        Args:
            sizes: the numbers of ranks that may have dealt the sequences among them.
            detached: weights of routers without a gradient.
        """
        gates = [self.model.get_submodule(name.rpartition(".")[0]) for name in detached]
        hooks = [gate.register_forward_hook(lambda _, __, x: x.detach()) for gate in gates]
        yield "as the detached router makes it", self._of_rows(slice(None))[1]
        for hook in hooks:
            hook.remove()
        targets_B = (self._step.labels_BS != IGNORE_INDEX).sum(1)
        for ranks in sorted(n for n in sizes if len(targets_B) % n == 0):
            size, means = len(targets_B) // ranks, dict[str, Tensor]()
            for rank in range(ranks):
                rows = slice(rank * size, (rank + 1) * size)
                share = targets_B[rows].sum().item() * ranks / targets_B.sum().item()
                _, own = self._of_rows(rows)
                for name, gradient in own.items():
                    means[name] = means.get(name, 0) + gradient / max(share, 1e-9)
                yield f"of rank {rank}'s sequences alone: a sum over {ranks} ranks is missing", own
            yield f"a mean of {ranks} ranks' means: not the mean over all targets", means


def _number(name: str, theirs: float, ours: float, scale: Scale, cause: str = "") -> Part:
    """Compares a number; `cause` explains it if it differs."""
    agrees = abs(theirs - ours) <= scale.bound * abs(ours)
    says = "agrees" if agrees else f"differs, {cause or scale.words(theirs / ours)}"
    return Part(name, agrees, f"{says}: {theirs:.12g}, ours {ours:.12g}")


def _gradients(step: ForeignStep, ours: _Ours, scale: Scale) -> Part:
    causes = {name: _cause(name, step, ours, scale, []) for name in ours.gradients}
    unexplained = [name for name, says in causes.items() if UNEXPLAINED in says]
    if unexplained:
        detached = [name for name, says in causes.items() if says.startswith("router detached")]
        mistakes = list(ours.mistakes({*scale.axes.values()}, detached))
        for name in unexplained:
            causes[name] = _cause(name, step, ours, scale, mistakes)
    return _part(
        "gradients",
        (
            _verdict((name, step), step.gradients[name][0], ours.gradients[name], scale.least, says)
            for name, says in causes.items()
        ),
    )


def _cause(
    name: str,
    step: ForeignStep,
    ours: _Ours,
    scale: Scale,
    mistakes: Sequence[tuple[str, dict[str, Tensor]]],
) -> str:
    """Says what is wrong with the gradient of a parameter."""
    (theirs, summed), wanted = step.gradients[name], ours.gradients[name]
    if not torch.equal(theirs, summed):
        is_sum = error(summed, wanted, scale.least) <= scale.bound
        return f"ranks hold different copies{', a sum over ranks is missing' * is_sum}"
    found = cause(name, theirs, wanted, scale, [(says, each[name]) for says, each in mistakes])
    if found.startswith("zero:"):
        none = step.places[name].tensors().keys() <= set(step.facts.no_gradient)
        who = "router detached" if ".router." in name else "detached"
        return f"{who}: {'no gradient' if none else 'its gradient is zero'}"
    return found


def _verdict(
    whose: tuple[str, ForeignStep], theirs: Tensor, ours: Tensor, least: float, says: str
) -> TensorVerdict:
    name, step = whose
    norms = theirs.norm().item(), ours.norm().item()
    chord = (theirs / (norms[0] or 1) - ours / (norms[1] or 1)).norm().item()
    angle = math.degrees(2 * math.asin(min(chord / 2, 1.0)))
    pairs = zip(units(name, theirs), units(name, ours), strict=True)
    far = worst(error(*pair, least) for pair in pairs)
    ratio = norms[0] / norms[1] if norms[1] else math.inf if norms[0] else 1.0
    return TensorVerdict(name, step.places[name].way.name, ratio, angle, far, says)


def _part(name: str, verdicts: Iterator[TensorVerdict]) -> Part:
    tensors = list(verdicts)
    right = [each for each in tensors if not each.cause]
    wrong, total = len(tensors) - len(right), len(tensors)
    says = f"{wrong} of {total} differ" if wrong else f"all {total} agree"
    if right:
        most = max(right, key=lambda each: each.error)
        says += f"{'; the others agree' * (wrong > 0)}, worst {most.error:.1e} ({most.name})"
    return Part(name, not wrong, says, tensors)


def _norm(theirs: float, step: ForeignStep, ours: _Ours, scale: Scale) -> list[Part]:
    kinds = {"its own": {n: pair[0] for n, pair in step.gradients.items()}, "our": ours.gradients}
    found = {whose: norm_cause(theirs, gradients, scale) for whose, gradients in kinds.items()}
    says = next((f"{says} ({whose} gradients)" for whose, says in found.items() if says), "")
    parts = [_number("norm", theirs, ours.norm, scale, says)]
    if (most := step.facts.max_norm) is not None:
        factors = [min(1.0, most / max(norm, 1e-300)) for norm in (theirs, ours.norm)]
        parts.append(_number("clipping", *factors, scale, "by that norm"))
    return parts


def _update(step: ForeignStep, ours: _Ours) -> list[Part]:
    """Compares what a step added with AdamW's first step on the program's own gradients."""
    facts, verdicts = step.facts, []
    for name, (after, _) in step.updated.items():
        assert facts.optimizer is not None
        before, gradient = ours.parameters[name], step.gradients[name][0]
        if facts.max_norm is not None and facts.grad_norm:
            gradient = gradient * min(1.0, facts.max_norm / facts.grad_norm)
        added, digits = after - before, torch.finfo(getattr(torch, facts.dtype)).eps
        resolved = digits * before.norm().item() / (added.norm().item() or 1.0)
        bound = max(ROUNDING[facts.dtype].update, resolved)
        says = update_cause(added, before, gradient, facts.optimizer, bound)
        decay = facts.optimizer.weight_decay * (before.ndim > 1)
        wanted = adamw(gradient, before, facts.optimizer, decay)
        verdicts.append(_verdict((name, step), added, wanted, 0.0, says))
    return [_part("update", iter(verdicts))]


def _layers(step: ForeignStep, ours: _Ours, bound: float) -> list[Part]:
    """Compares outputs of layers, token by token; names the first layer that differs."""
    most = 0.0
    for name, ours_BSD in ours.outputs.items():
        norm_BS = ours_BSD.norm(dim=-1)
        far_BS = (step.activations[name] - ours_BSD).norm(dim=-1) / norm_BS.clamp(min=1e-300)
        most = max(most, worst([far_BS.max().item()]))
        if wrong := (~(far_BS <= bound)).nonzero().tolist():
            where = "sequence {}, position {}".format(*wrong[0])
            says = f"{name} is the first that differs: {len(wrong)} of {far_BS.numel()} tokens"
            return [Part("layers", False, f"{says}, first at {where}, worst {most:.1e}")]
    return [Part("layers", True, f"all {len(ours.outputs)} agree, worst {most:.1e}")] * bool(most)
