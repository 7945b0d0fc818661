"""A step of a run made again: whole, in pieces, and with the worst of them left out."""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import TypeVar

import torch
import torch.distributed as dist
from tqdm import tqdm

from titan_moe.data.batch import Batch, fingerprints
from titan_moe.data.tokenizer import Tokenizer
from titan_moe.debug.why.findings import (
    Expert,
    Explanation,
    Figures,
    Layer,
    Part,
    Without,
    heaviest_first,
    within,
)
from titan_moe.debug.why.pieces import Pieces, Sums, documents_of, only, sequences, without
from titan_moe.debug.why.places import (
    expert_figures,
    layer_figures,
    middle,
    norm_without_expert,
)
from titan_moe.debug.why.repetition import Repetition
from titan_moe.debug.why.run import Run
from titan_moe.debug.why.tokens import WorstTokens
from titan_moe.debug.why.usual import (
    MOST_STEPS,
    Measured,
    Usual,
    from_result,
    from_sums,
    logged_figures,
    notes,
    usual,
)
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.launch import Launch
from titan_moe.runtime.process import process_group

T = TypeVar("T")
Say = Callable[[str], None]
_SHOWN = 20
"""Entries of each list that an explanation keeps."""


def explain(run: Run, *, most_documents: int, say: Say) -> Explanation:
    """Make a step again in this process. Raises ConfigError or RunError in lines for the user.

    Args:
        most_documents: whose gradients are computed one by one, in the heaviest sequences.
        say: told what is being done.
    """
    try:
        with (
            process_group(Launch(), run.job.comm, os.environ) as process,
            closing(Repetition(run, process, say)) as repetition,
        ):
            repeated = _repeat(repetition, run, say)
            batches = repetition.read()
            repetition.drop_optimizer()
            pieces = Pieces(repetition.sharded, process.device)
            following = _following(repetition, pieces)
            study = Study(pieces, batches, repetition.tokenizer)
            return _explanation(run, study, repeated, following, most_documents)
    except torch.OutOfMemoryError:
        raise RunError(
            f"the whole model and one sequence of {run.job.training.seq_len} tokens do not fit "
            "into the GPU's memory: use a larger one, or leave GPUs out with CUDA_VISIBLE_DEVICES="
        ) from None
    finally:  # Alone: no peer waits.
        if dist.is_initialized():
            dist.destroy_process_group()


def _repeat(repetition: Repetition, run: Run, say: Say) -> dict[int, Measured]:
    """Train up to the step; what was measured by step, of early ones loss and norm alone."""
    found: dict[int, Measured] = {}
    for step in range(repetition.step + 1, run.step):
        if (result := repetition.train(repetition.read())) is None:
            say(f"step {step}: left out, as by the run")
            continue
        found[step] = from_result(result, repetition.sharded.all_moe_layers())
        if (early := found.get(step - MOST_STEPS)) is not None:
            found[step - MOST_STEPS] = Measured(early.figures, {}, {})
        here, there = found[step].figures, logged_figures(run, step)
        log = "" if there is None else f" (logged: {there.loss:.5f}, {there.norm:.4f})"
        say(f"step {step}: loss {here.loss:.5f}, gradient norm {here.norm:.4f}{log}")
    return found


def _following(repetition: Repetition, pieces: Pieces) -> Measured | None:
    """The batch after the step's, on the same weights."""
    try:
        return from_sums(pieces.sums(repetition.read()))
    except RunError:  # The data has ended.
        return None


def _explanation(
    run: Run,
    study: "Study",
    repeated: dict[int, Measured],
    following: Measured | None,
    most_documents: int,
) -> Explanation:
    latest = list(repeated)[-MOST_STEPS:]
    beside, compared_with = following, "the next batch on the same weights"
    if latest:
        beside = middle([repeated[step] for step in latest])
        compared_with = f"the median of steps {latest[0]} to {latest[-1]}"
    held_to, now = usual(run, repeated, following), study.now
    rows = study.rows()
    documents = in_order(study.documents(rows, most_documents), now.figures, held_to)
    layers = layer_figures(now, beside)
    experts = expert_figures(now, beside, study.counts)
    tried, needed = study.without_documents(documents, held_to.limit)
    made = {step: each.figures for step, each in repeated.items()} | {run.step: now.figures}
    return Explanation(
        run=str(run.folder),
        step=run.step,
        start=_start(run),
        now=now.figures,
        targets=study.num_targets,
        logged=logged_figures(run, run.step),
        usual=held_to.figures,
        usual_of=held_to.of,
        compared_with=compared_with,
        limit=held_to.limit,
        following=None if following is None else following.figures,
        notes=notes(run, made, study.fingerprint),
        rows=sorted(rows, key=lambda part: heaviest_first(part.weight)),
        documents=documents,
        num_documents=study.num_documents,
        tokens=study.tokens.worst(),
        layers=layers,
        experts=experts[:_SHOWN],
        without=[*tried, *study.without_parts(layers, experts)],
        needed=needed,
    )


def _start(run: Run) -> str:
    left_out = run.decisions.left_out
    more = f", without the batches that the run left out when it went back ({left_out})"
    return str(run.checkpoint or "the beginning of the run") + (more if left_out else "")


class Study:
    """One step's batches on the weights that it found."""

    def __init__(self, pieces: Pieces, batches: list[Batch], tokenizer: Tokenizer) -> None:
        self._pieces, self._batches = pieces, batches
        self._rows = sequences(batches)
        self.tokens = WorstTokens(tokenizer, _SHOWN)
        sums = pieces.sums(batches)
        pieces.keep()
        self.now = from_sums(sums)
        self.num_targets, self._square = sums.num_targets, sums.norm**2
        self.num_documents = sum(len(documents_of(row)) for row in self._rows)
        self.fingerprint = sum(sum(fingerprints(batch)) for batch in batches)
        self.counts: list[dict[str, list[int]]] = []
        """Tokens of each expert by layer, of every sequence."""

    def rows(self) -> list[Part]:
        """Every sequence alone, in their order."""
        found = []
        for number, row in enumerate(_shown("sequences", self._rows)):
            sums, losses_S = self._pieces.token_losses(row)
            self.tokens.add(number, row, losses_S)
            self.counts.append(sums.counts)
            found.append(self._part(number, None, ", ".join(row.samples[0]), sums))
        return found

    def documents(self, rows: Sequence[Part], most: int) -> list[Part]:
        """The documents of the heaviest sequences, one by one, and those sequences' own losses."""
        chosen: list[tuple[int, int]] = []
        for part in sorted(rows, key=lambda part: heaviest_first(part.weight)):
            chosen += [(part.row, each) for each in documents_of(self._rows[part.row])]
            if len(chosen) >= most:
                break
        found = []
        for number, document in _shown("documents", chosen[:most]):
            row = self._rows[number]
            sums = self._pieces.sums([only(row, document)], balance=False)
            found.append(self._part(number, document, row.samples[0][document], sums))
        if self._pieces.has_balance_losses:
            for number in _shown("balance losses", sorted({row for row, _ in chosen[:most]})):
                sums = self._pieces.sums([only(self._rows[number], None)])
                found.append(self._part(number, None, "(balance losses)", sums))
        return found

    def without_documents(
        self, ordered: Sequence[Part], limit: Figures
    ) -> tuple[list[Without], int | None]:
        """The step without the targets of the worst documents: of one, two, four, ... until it is
        within the limit, then of fewer by bisection; and how many it takes.

        Of a step that is not finite, sequences without a target are left out whole: no product
        makes a number of NaN.
        """
        places = [(part.row, part.document) for part in ordered if part.document is not None]
        most = min(len(places), self.num_documents - 1)
        found: dict[int, Without] = {}

        def helps(count: int) -> bool:
            batches = without(self._batches, set(places[:count]))
            if not self.now.figures.finite:
                batches = [row for row in sequences(batches) if documents_of(row)]
            what = f"the worst {count} documents" if count > 1 else "the worst document"
            figures = from_sums(self._pieces.sums(batches)).figures
            found[count] = Without(what, figures, count)
            return within(figures, limit)

        if most < 1:
            return [], None
        low, high, enough = 0, 1, helps(1)
        if within(self.now.figures, limit):
            return list(found.values()), None
        while not enough and high < most:
            low, high = high, min(2 * high, most)
            enough = helps(high)
        while enough and high - low > 1:
            tried = (low + high) // 2
            low, high = (low, tried) if helps(tried) else (tried, high)
        return [found[count] for count in sorted(found)], high if enough else None

    def without_parts(self, layers: Sequence[Layer], experts: Sequence[Expert]) -> list[Without]:
        """The step without what the first expert gives, without its gradient, and without that of
        the first layer."""
        found, loss = [], self.now.figures.loss
        for worst in experts[:1]:
            with self._pieces.without_output(worst.layer, worst.expert):
                made = from_sums(self._pieces.sums(self._batches))
            norm = norm_without_expert(made.norms, worst.layer, worst.expert)
            found.append(Without(f"the output of {worst.name}", Figures(made.figures.loss, norm)))
            found.append(Without(f"the gradient of {worst.name}", Figures(loss, worst.without)))
        for layer in layers[:1]:
            found.append(Without(f"the gradient of {layer.name}", Figures(loss, layer.without)))
        return found

    def _part(self, row: int, document: int | None, name: str, sums: Sums) -> Part:
        """Of the last backward."""
        return Part(
            row=row,
            document=document,
            name=name,
            targets=sums.num_targets,
            loss=sums.loss / sums.num_targets if sums.num_targets else math.nan,
            norm=sums.norm / max(self.num_targets, 1),
            share=self._pieces.along() / self._square if self._square else 0.0,
        )


def in_order(parts: Sequence[Part], now: Figures, held_to: Usual) -> list[Part]:
    """By their share of the gradient; where the loss alone is unusual, by what they add to it above
    the usual loss, and last those that add none."""
    by_loss = now.norm <= held_to.limit.norm and not now.loss <= held_to.limit.loss

    def key(part: Part) -> float:
        if not by_loss:
            return heaviest_first(part.weight)
        excess = part.targets * (part.loss - held_to.figures.loss)
        return math.inf if part.document is None else heaviest_first(excess)

    return sorted(parts, key=key)


def _shown(what: str, things: Iterable[T]) -> Iterable[T]:
    """With a bar on a terminal."""
    return tqdm(things, desc=what, leave=False, dynamic_ncols=True, disable=None)
