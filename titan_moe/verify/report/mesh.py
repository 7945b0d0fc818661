"""Layouts drawn as nested boxes of rank numbers, in the dense and in the sparse view."""

from collections.abc import Sequence
from html import escape
from math import prod

from titan_moe.distributed.parallel_dims import DENSE_AXES, SPARSE_AXES
from titan_moe.verify.compare.records import RunRecord
from titan_moe.verify.report.words import layout_of, layout_words

STYLE = """
.meshes { display: flex; flex-wrap: wrap; gap: 1rem 2rem; align-items: flex-start }
.meshes figure { margin: 0; max-width: 100% } figcaption { font-size: 12px; margin-bottom: .3rem }
.mesh { overflow-x: auto; padding-bottom: .3rem }
.box { border: 1px solid var(--line); border-radius: 4px; padding: .1rem .3rem .3rem;
  background: var(--panel); display: inline-block; vertical-align: top; margin: .15rem }
.box > i, .row > i { color: var(--soft); font: 10px system-ui, sans-serif }
.row { white-space: nowrap } .row > i { margin-right: .2rem }
.box > i { display: block; white-space: nowrap }
.across { display: flex; flex-wrap: wrap; gap: .1rem }
.down { display: flex; flex-direction: column; align-items: flex-start; gap: .1rem }
.across > .more { align-self: center }
.rank { display: inline-block; min-width: 1.5rem; padding: .1rem .15rem; margin: .1rem;
  text-align: center; border: 1px solid var(--one); border-radius: 3px; background: Canvas;
  font-variant-numeric: tabular-nums }
.more { color: var(--soft); font-size: 11px; padding: .2rem; white-space: nowrap }
"""
VIEWS = {
    "dense": (DENSE_AXES, "attention, router, shared experts, embeddings, norms"),
    "sparse": (SPARSE_AXES, "routed experts"),
}
_ALL_DRAWN = 64
_DRAWN = 2
"""Boxes of each axis that are drawn of a larger world."""


def meshes(names: Sequence[str], run: RunRecord) -> str:
    """Both views of the ranks of runs that share a layout, each rank once in each; above 64 ranks
    the first of each axis."""
    head = escape(", ".join(names))
    sizes = layout_of(run)
    if not sizes:
        return f"<p>{head}: the layout is unknown, for there is no run.json.</p>"
    drawn = "".join(_view(name, sizes) for name in VIEWS)
    return f"<h3>{head}: {escape(layout_words(run))}</h3><div class=meshes>{drawn}</div>"


def _view(name: str, sizes: dict[str, int]) -> str:
    axes, what = VIEWS[name]
    known = [(axis, int(sizes.get(axis, 1))) for axis in axes]
    world = prod(size for _, size in known)
    words = " x ".join(f"{axis} {size}" for axis, size in known if size > 1) or "one rank"
    most = world if world <= _ALL_DRAWN else _DRAWN
    larger = [(axis, size) for axis, size in known if size > 1]
    left_out = f"; drawn: the first {most} of each axis of {world} ranks" if most < world else ""
    return (
        f"<figure><figcaption><b>{name}</b> ({what}): {words}{left_out}</figcaption>"
        f'<div class="mesh {name}">{_boxes(larger, 0, most, "")}</div></figure>'
    )


def _boxes(axes: list[tuple[str, int]], first: int, most: int, place: str) -> str:
    """The ranks from `first` on that these axes hold, outermost axis first."""
    if not axes:
        return _rank(first, "alone")
    (axis, size), *inner = axes
    stride = prod(size for _, size in inner)
    found = []
    for i in range(min(size, most)):
        here = f"{place}{axis} {i} "
        at = first + i * stride
        if inner:
            held = _boxes(inner, at, most, here)
            found.append(f"<div class=box><i>{axis} {i}</i>{held}</div>")
        else:
            found.append(_rank(at, here))
    if size > most:
        found.append(f"<span class=more>\N{HORIZONTAL ELLIPSIS} {axis} {size - 1}</span>")
    if not inner:
        return f"<div class=row><i>{axis}</i>{''.join(found)}</div>"
    # Stages of a pipeline stand below each other; what works on the same layers, side by side.
    direction = "down" if axis == "pp" else "across"
    return f"<div class={direction}>{''.join(found)}</div>"


def _rank(rank: int, place: str) -> str:
    return f'<span class=rank title="rank {rank}: {place.strip()}">{rank}</span>'
