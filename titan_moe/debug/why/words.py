"""An explanation as sentences and tables of text, for a terminal and for a page."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from titan_moe.debug.why.findings import Explanation, Figures, Part, within

_NAMED = 3
"""Documents that a sentence names."""
_ROWS = 8
"""Rows of a table on a terminal."""
_LONGEST = 60


class Rows(NamedTuple):
    """A table of text."""

    title: str
    heads: list[str]
    rows: list[list[str]]
    numbers: frozenset[int]
    """Columns that are aligned on the right."""


def sentences(found: Explanation) -> list[str]:
    """What stands out, most telling first."""
    lines = [_headline(found)]
    if not found.is_unusual:
        lines.append(f"Neither is unusual beside {found.usual_of}.")
    elif (next_batch := _next_batch(found)) is not None:
        lines.append(next_batch)
    lines += _documents(found)
    stands_out = "stands out" if found.is_unusual else "has most of the gradient"
    if found.layers:
        layer = found.layers[0]
        lines.append(
            f"Of all layers {layer.name} {stands_out}: {_share(layer.share)} of the squared norm, "
            f"{_times(layer.norm, layer.usual)}, mostly in {layer.largest}."
        )
    if found.experts:
        worst = found.experts[0]
        rows = ", ".join(f"{count} from sequence {row}" for row, count in worst.from_rows)
        lines.append(
            f"Of all experts {worst.name} {stands_out}: {_share(worst.share)} of the squared norm, "
            f"{_times(worst.norm, worst.usual)}; {worst.load:,} tokens ({rows or 'none'}), an even "
            f"load is {worst.even_load:,.0f}."
        )
    return lines


def tables(found: Explanation) -> list[Rows]:
    """Everything, a table each."""
    shown = [_figures(found), _parts("Documents", found.documents, found), _tokens(found)]
    shown += [_parts("Sequences", found.rows, found), _layers(found)]
    if found.experts:
        shown.append(_experts(found))
    return [*shown, _without(found)]


def lines(found: Explanation) -> list[str]:
    """For a terminal: the beginning of each table."""
    shown = [*sentences(found), *(f"Note: {note}." for note in found.notes)]
    for table in tables(found):
        shown += ["", *_text(table)]
    return shown


def _headline(found: Explanation) -> str:
    now, usual = found.now, found.usual
    return (
        f"Step {found.step}: loss {_number(now.loss)} (usual: {_number(usual.loss)}), gradient "
        f"norm {_number(now.norm)} (usual: {_number(usual.norm)}, by {found.usual_of})."
    )


def _next_batch(found: Explanation) -> str | None:
    """Whether it is the data of the step or the weights that it found."""
    following = found.following
    if following is None:
        return None
    told = f"loss {_number(following.loss)}, gradient norm {_number(following.norm)}"
    if within(following, found.limit):
        return f"The next batch on the same weights is usual ({told}): it is this step's data."
    return f"The next batch on the same weights is unusual too ({told}): it is the weights."


def _documents(found: Explanation) -> list[str]:
    documents = [part for part in found.documents if part.document is not None]
    if not documents:
        return []
    worst = documents[0]
    lines = [
        f"The worst of {found.num_documents} documents is {_document(worst)}: "
        f"{_share(worst.share)} of the squared norm, mean loss {_number(worst.loss)} over "
        f"{worst.targets:,} targets."
    ]
    if found.needed is not None:
        those = ", ".join(_document(part) for part in documents[: min(found.needed, _NAMED)])
        more = f" and {found.needed - _NAMED} more" if found.needed > _NAMED else ""
        lines.append(
            f"Without {found.needed} of {found.num_documents} documents the step is a usual one: "
            f"{those}{more}."
        )
    elif found.is_unusual and (tried := [each for each in found.without if each.documents]):
        lines.append(
            f"No few documents explain it: without {tried[-1].what} the loss is "
            f"{_number(tried[-1].figures.loss)}, the gradient norm "
            f"{_number(tried[-1].figures.norm)}."
        )
    return lines


def _document(part: Part) -> str:
    return f"{part.name} in sequence {part.row}"


def _figures(found: Explanation) -> Rows:
    known: list[tuple[str, Figures | None]] = [
        ("this step, made again", found.now),
        ("this step, as logged", found.logged),
        (f"usual: {found.usual_of}", found.usual),
        ("unusual above", found.limit),
        ("the next batch on the same weights", found.following),
    ]
    rows = [[what, _number(of.loss), _number(of.norm)] for what, of in known if of is not None]
    return Rows("The step", ["", "loss", "gradient norm"], rows, frozenset({1, 2}))


def _parts(title: str, parts: Sequence[Part], found: Explanation) -> Rows:
    heads = ["sequence", "share", "norm", "mean loss", "targets", "what"]
    rows = [
        [
            str(part.row),
            _share(part.share),
            _number(part.norm),
            _number(part.loss),
            f"{part.targets:,}",
            part.name,
        ]
        for part in parts
    ]
    return Rows(title, heads, rows, frozenset(range(5)))


def _tokens(found: Explanation) -> Rows:
    rows = [
        [
            str(token.row),
            str(token.position),
            _number(token.loss),
            repr(token.text),
            repr(token.before),
            token.name,
        ]
        for token in found.tokens
    ]
    heads = ["sequence", "position", "loss", "target", "text before it", "document"]
    return Rows("Tokens", heads, rows, frozenset({0, 1, 2}))


def _layers(found: Explanation) -> Rows:
    rows = [
        [each.name, _share(each.share), _number(each.norm), _number(each.usual), each.largest]
        for each in found.layers
    ]
    heads = ["layer", "share", "norm", "usual", "most of it in"]
    return Rows("Layers", heads, rows, frozenset({1, 2, 3}))


def _experts(found: Explanation) -> Rows:
    rows = [
        [
            each.name,
            _share(each.share),
            _number(each.norm),
            _number(each.usual),
            f"{each.load:,}",
            "-" if math.isnan(each.usual_load) else f"{each.usual_load:,.0f}",
            ", ".join(f"{row} ({count})" for row, count in each.from_rows),
        ]
        for each in found.experts
    ]
    heads = ["expert", "share", "norm", "usual", "tokens", "usual", "most from sequences"]
    return Rows("Experts", heads, rows, frozenset(range(1, 6)))


def _without(found: Explanation) -> Rows:
    rows = [
        [each.what, _number(each.figures.loss), _number(each.figures.norm)]
        for each in found.without
    ]
    return Rows("Left out", ["without", "loss", "gradient norm"], rows, frozenset({1, 2}))


def _text(table: Rows) -> list[str]:
    """In columns; of many rows the first."""
    rows = [[_shortened(text) for text in row] for row in table.rows[:_ROWS]]
    widths = [max(map(len, column)) for column in zip(table.heads, *rows, strict=True)]
    shown = [table.title]
    for row in (table.heads, *rows):
        cells = [
            text.rjust(width) if column in table.numbers else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        shown.append("  " + "  ".join(cells).rstrip())
    if (more := len(table.rows) - _ROWS) > 0:
        shown.append(f"  and {more} more on the page")
    return shown


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def _times(norm: float, usual: float) -> str:
    if not usual > 0:
        return f"norm {_number(norm)}"
    return f"{norm / usual:.3g} times its usual norm"
