"""Lays one step of another program beside ours, computed by one plain process."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titan_moe.checkpoint.hf.read import load_alone
from titan_moe.data.batch import IGNORE_INDEX
from titan_moe.models.hf import model_of
from titan_moe.moe.router import Scores
from titan_moe.verify.foreign import causes
from titan_moe.verify.foreign.causes import Scale, error, units
from titan_moe.verify.foreign.folder import ForeignStep, read_step
from titan_moe.verify.gradients.compare import first_few, worst
from titan_moe.verify.localize.difference import ROUNDING
from titan_moe.verify.parity.check import joined_gradients

_WEAK = 1e3
"""A difference is divided by a tensor's own norm, but at least by the usual norm times the bound
times this: a gradient that is zero in theory holds rounding errors."""


class Part(NamedTuple):
    """The verdict on one part of a step: its loss, gradients, norm, ..."""

    name: str
    agrees: bool
    lines: list[str]
    tensors: Sequence[dict[str, Any]] = ()
    """The figures of each tensor."""


def judge(folder: Path, hf_folder: Path, dtype: str) -> list[Part]:
    """Compares the step in a folder with ours from the same weights. Raises ConfigError or RunError
    for what cannot be compared, before anything runs."""
    model = model_of(hf_folder)
    step = read_step(folder, replace(model, config=replace(model.config, num_mtp_layers=0)))
    court, facts = _Court(step, hf_folder, dtype), step.facts
    who = f"{facts.program} {facts.version} ({facts.layout or 'one process'}, {facts.dtype})"
    head = f"{who} beside one process in {dtype}; equal means up to {court.scale.bound:.0e}"
    head += ": rounding passes for mistakes, hand in float32" * facts.dtype.endswith("16")
    parts = [Part("step", True, [head]), court.number("loss", facts.loss, court.our_loss)]
    return [*parts, court.gradients(), *court.norm(), *court.update(), *court.layers()]


class _Court:
    """Computes the step anew, and judges each part of theirs."""

    def __init__(self, step: ForeignStep, folder: Path, dtype: str) -> None:
        self.step, self.facts, cpu = step, step.facts, torch.device("cpu")
        self.model = load_alone(folder, dtype=getattr(torch, dtype), device=cpu).model
        self.parameters = {n: p.detach().double() for n, p in self.model.named_parameters()}
        self.outputs: dict[str, Tensor] = {}
        for name in step.activations:
            self.model.blocks()[name].register_forward_hook(partial(self._keep, name))
        self.our_loss, self.ours = self._of_rows(slice(None))
        self.our_norm = math.hypot(*(g.norm().item() for g in self.ours.values()))
        bound = max(ROUNDING[each].bound for each in (self.facts.dtype, dtype))
        least = min(1.0, _WEAK * bound) * self.our_norm / math.sqrt(len(self.ours))
        sizes = {a: int(n) for a, n in re.findall(r"(\w+)=(\d+)", self.facts.layout) if n != "1"}
        sets = [names for n in range(1, len(sizes) + 1) for names in combinations(sizes, n)]
        axes = {" x ".join(names): math.prod(sizes[name] for name in names) for names in sets}
        divisors = {n for n in range(2, len(step.tokens_BS) + 1) if len(step.tokens_BS) % n == 0}
        axes |= {f"{n} microbatches": n for n in sorted(divisors - {*axes.values()})}
        targets, positions = self.facts.num_targets, step.tokens_BS.numel()
        named = {
            f"a sum over {targets} targets: not their mean": targets,
            f"divided by {positions} positions: not by {targets} targets": targets / positions,
            "clipped: written after clipping": self._clip(self.our_norm),
        }
        named = {says: factor for says, factor in named.items() if factor != 1}
        self.scale = Scale(bound, least, axes, named)

    def _keep(self, name: str, module: nn.Module, args: object, x_BSD: Tensor) -> None:
        self.outputs.setdefault(name, x_BSD.detach().double())

    def _clip(self, norm: float) -> float:
        return min(1.0, (self.facts.max_norm or math.inf) / max(norm, 1e-300))

    def _of_rows(self, rows: slice | Tensor) -> tuple[float, dict[str, Tensor]]:
        """Returns the part of some sequences in the loss and in its gradients."""
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(".indexer." not in name)
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        loss = self.model(self.step.tokens_BS[rows], labels_BS=self.step.labels_BS[rows])
        loss = loss / self.facts.num_targets
        loss.backward()
        gradients = joined_gradients(self.model, self.model.config).items()
        return loss.item(), {name: gradient.double() for name, gradient in gradients}

    def number(self, name: str, theirs: float, ours: float, cause: str = "") -> Part:
        agrees = abs(theirs - ours) <= self.scale.bound * abs(ours)
        cause = cause or self.scale.words(theirs / ours).replace(causes.SAME, "by no known factor")
        says = "agrees" if agrees else f"differs, {cause}"
        return Part(name, agrees, [f"{name:<11}{says}: {theirs:.12g}, ours {ours:.12g}"])

    def _part(self, name: str, pairs: dict[str, tuple[Tensor, Tensor, str]], least: float) -> Part:
        """Compares tensors of theirs with ours; the third says what explains a difference."""
        found = [self._figures(ours, *pair, least) for ours, pair in pairs.items()]
        wrong = [each for each in found if each["cause"]]
        says = f"{len(wrong)} of {len(found)} differ" if wrong else f"all {len(found)} agree"
        if right := [(each["error"], each["name"]) for each in found if not each["cause"]]:
            says += ", worst{} {:.1e} ({})".format(" of the others" * bool(wrong), *max(right))
        by_cause: dict[str, list[str]] = {}
        line = "{name} ({theirs}): ratio {ratio:.6g}, angle {angle:.3g}°, error {error:.1e}"
        for each in wrong:
            by_cause.setdefault(f"  {each['cause']}:", []).append(line.format(**each))
        lines = [f"{name:<11}{says}"]
        for cause, tensors in by_cause.items():
            lines += [cause, *("    " + each for each in first_few(tensors))]
        return Part(name, not wrong, lines, found)

    def _figures(
        self, name: str, theirs: Tensor, ours: Tensor, cause: str, least: float
    ) -> dict[str, Any]:
        norms = theirs.norm().item(), ours.norm().item()
        chord = (theirs / (norms[0] or 1) - ours / (norms[1] or 1)).norm().item()
        far = map(partial(error, least=least), units(name, theirs), units(name, ours))
        return {
            "name": name,
            "theirs": self.step.places[name].way.name,
            "ratio": norms[0] / norms[1] if norms[1] else 1.0,
            "angle": math.degrees(2 * math.asin(min(chord / 2, 1.0))) if all(norms) else 0.0,
            "error": worst(far),
            "cause": cause,
        }

    def gradients(self) -> Part:
        found = {name: self._cause(name, {}) for name in self.ours}
        if unexplained := [name for name, says in found.items() if causes.VAGUE in says]:
            detached = [name for name, says in found.items() if says.startswith("router detached")]
            mistakes = dict(self._mistakes(detached))
            found |= {name: self._cause(name, mistakes) for name in unexplained}
        # In the order of a backward, a cause stands before what follows from it.
        pairs = {n: (self.step.gradients[n], self.ours[n], found[n]) for n in reversed(found)}
        return self._part("gradients", pairs, self.scale.least)

    def _cause(self, name: str, mistakes: dict[str, dict[str, Tensor]]) -> str:
        """Says what is wrong with the gradient of a parameter."""
        theirs, mean = self.step.gradients[name], self.step.means[name]
        apart = map(partial(error, least=self.scale.least), units(name, mean), units(name, theirs))
        if worst(apart) > self.scale.bound:
            counts = {1, *self.scale.axes.values()}
            errors = [error(mean * n, self.ours[name], self.scale.least) for n in counts]
            is_sum = min(errors) <= self.scale.bound
            return f"ranks hold different copies{': a sum over ranks is missing' * is_sum}"
        tried = {"": self.ours[name]} | {says: each[name] for says, each in mistakes.items()}
        found = causes.cause(name, theirs, tried, self.scale)
        if not found.startswith("zero:"):
            return found
        none = self.step.places[name].tensors().keys() <= set(self.facts.no_gradient)
        who = "router detached" if ".router." in name else "detached"
        return f"{who}: {'no gradient' if none else 'its gradient is zero'}"

    def _mistakes(self, detached: Sequence[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yields mistakes in words, and the gradients that each gives.

        Args:
            detached: weights of routers without a gradient.
        """
        routers = {name.partition(".router.")[0] + ".router" for name in detached}
        modules = [self.model.get_submodule(name) for name in routers]
        hooks = [each.register_forward_hook(_detach) for each in modules]
        yield "as the detached router makes it", self._of_rows(slice(None))[1]
        for hook in hooks:
            hook.remove()
        targets_B = (self.step.labels_BS != IGNORE_INDEX).sum(1)
        sizes = {n: axis for axis, n in self.scale.axes.items() if len(targets_B) % n == 0}
        for n, axis in sorted(sizes.items()):
            one, many = ("microbatch", "microbatches") if "micro" in axis else ("rank", "ranks")
            means = {name: torch.zeros_like(gradient) for name, gradient in self.ours.items()}
            for i, rows in enumerate(torch.arange(len(targets_B)).chunk(n)):
                own = self._of_rows(rows)[1]
                share = targets_B[rows].sum().item() * n / self.facts.num_targets
                means = {name: mean + own[name] / (share or 1) for name, mean in means.items()}
                if one == "rank" or i == n - 1:  # Each holds all gradients.
                    yield f"of {one} {i}'s sequences alone: a sum over {n} {many} is missing", own
            yield f"a mean of {n} {many}' means: not the mean over all targets", means

    def norm(self) -> Iterator[Part]:
        if (norm := self.facts.grad_norm) is None:
            return
        kinds = {"its own": self.step.gradients, "our": self.ours}.items()
        found = [(causes.norm_cause(norm, each, self.scale), whose) for whose, each in kinds]
        says = next((f"{says} (of {whose} gradients)" for says, whose in found if says), "")
        yield self.number("norm", norm, self.our_norm, says)
        if self.facts.max_norm is not None:
            clips = self._clip(norm), self._clip(self.our_norm)
            yield self.number("clipping", *clips, cause="by that norm")

    def update(self) -> Iterator[Part]:
        """Compares what a step added with AdamW's first step on the program's own gradients."""
        pairs, optimizer = {}, self.facts.optimizer
        if not self.step.updated or optimizer is None:
            return
        clip = self._clip(self.facts.grad_norm or 0)
        for name, after in self.step.updated.items():
            before, gradient = self.parameters[name], self.step.gradients[name] * clip
            added, dtype = after - before, self.facts.dtype
            pairs[name] = added, *causes.of_update(added, before, gradient, optimizer, dtype)
        yield self._part("update", pairs, 0.0)

    def layers(self) -> Iterator[Part]:
        """Compares outputs of layers, token by token; names the first layer that differs."""
        most = 0.0
        for name, ours_BSD in self.outputs.items():
            far_BS = (self.step.activations[name] - ours_BSD).norm(dim=-1) / ours_BSD.norm(dim=-1)
            most = max(most, worst([far_BS.max().item()]))
            if wrong := (~(far_BS <= self.scale.bound)).nonzero().tolist():
                says = f"{name} is the first that differs: {len(wrong)} of {far_BS.numel()} tokens"
                where = f"{says}, first at sequence {wrong[0][0]}, position {wrong[0][1]}"
                yield Part("layers", False, [f"layers     {where}, worst {most:.1e}"])
                return
        if self.outputs:
            says = f"layers     all {len(self.outputs)} agree, worst {most:.1e}"
            yield Part("layers", True, [says])


def _detach(router: nn.Module, args: object, scores: Scores) -> Scores:
    return Scores(*map(Tensor.detach, scores))
