"""Parts of a page that one run, several runs and a comparison have alike."""

from collections.abc import Sequence
from html import escape

from titan_moe.verify.compare.records import RunRecord
from titan_moe.verify.report import heat as report_heat
from titan_moe.verify.report import mesh as report_mesh
from titan_moe.verify.report.style import document, folded, paragraph, section, table
from titan_moe.verify.report.words import differing_keys, fact_rows, layout_of

STYLE = f"""
.top {{ border-left: .5rem solid var(--soft); padding: .3rem 1rem; margin: 1rem 0;
  background: var(--panel) }}
.top h2 {{ margin: .1rem 0; font-size: 1.6rem; color: var(--soft) }}
.top.right {{ border-color: var(--good) }} .top.right h2 {{ color: var(--good) }}
.top.wrong {{ border-color: var(--bad) }} .top.wrong h2 {{ color: var(--bad) }}
.top.open {{ border-color: var(--warn) }} .top.open h2 {{ color: var(--warn) }}
.top p {{ font-size: 1.05rem }}
.loud {{ border: 2px solid var(--warn); padding: .3rem 1rem; margin: .6rem 0 }}
.loud b {{ color: var(--warn) }} .loud ul {{ margin: .2rem 0; padding-left: 1.2rem }}
nav {{ line-height: 2 }} nav a {{ margin-right: 1rem; color: inherit; white-space: nowrap }}
.charts {{ display: grid; gap: 1rem 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(32rem, 100%), 1fr)) }}
.charts > div {{ overflow-x: auto; max-width: 46rem }}
svg.chart {{ width: 100%; min-width: 24rem; height: auto }}
summary {{ cursor: pointer; padding: .3rem 0; font-weight: 600 }}
section td {{ overflow-wrap: anywhere }} section td:first-child {{ overflow-wrap: normal }}
tr.quiet {{ color: var(--soft) }} tr.differs td:first-child {{ font-weight: 600 }}
tr.differs td:first-child::before {{ content: '\N{NOT EQUAL TO} '; color: var(--bad) }}
tr.beyond td {{ color: var(--bad) }}
{report_heat.STYLE}{report_mesh.STYLE}
"""


def report(title: str, top: str, sections: Sequence[tuple[str, str, str]]) -> str:
    """A page of what stands on top and of (name, title, body) below, with links to each."""
    links = " ".join(f'<a href="#{name}">{escape(head)}</a>' for name, head, _ in sections)
    body = "".join(section(name, head, content) for name, head, content in sections)
    return document(title, f"<h1>{escape(title)}</h1>{top}<nav>{links}</nav>{body}", style=STYLE)


def loud(head: str, lines: Sequence[str]) -> str:
    """What nobody should miss; nothing without lines."""
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<div class=loud><b>\N{WARNING SIGN} {escape(head)}</b><ul>{items}</ul></div>"


def layouts(runs: Sequence[RunRecord]) -> str:
    """Every run's ranks in both views; a layout that several share is drawn once."""
    drawn: list[tuple[dict[str, int], list[RunRecord]]] = []
    for run in runs:
        same = [those for sizes, those in drawn if sizes and sizes == layout_of(run)]
        if same:
            same[0].append(run)
        else:
            drawn.append((layout_of(run), [run]))
    found = paragraph(
        "Each number is a rank. Boxes are coordinates of the mesh, the outermost axis outside; "
        "axes of size 1 are left out. Both views hold the same ranks."
    )
    for _, those in drawn:
        found += report_mesh.meshes([run.name for run in those], those[0])
    return found


def configurations(runs: Sequence[RunRecord]) -> str:
    """A table of the keys that are not the same in all runs."""
    known = [run for run in runs if run.config]
    found = "".join(
        paragraph(f"{run.name}: the configuration is unknown, for there is no config.toml.")
        for run in runs
        if not run.config
    )
    if len(known) < 2:
        return found or paragraph("One run: nothing to compare.")
    rows, num_loud = differing_keys(known)
    if not rows:
        return found + paragraph("All keys are the same.")
    kinds = ["" if i < num_loud else "quiet" for i in range(len(rows))]
    said = f"Keys that may change what is trained: {num_loud}; others: {len(rows) - num_loud}."
    return found + paragraph(said) + table(["key", *names(known)], rows, kinds=kinds)


def environments(runs: Sequence[RunRecord]) -> str:
    """A table of code, torch, device, data, ...; what is not the same in all runs is marked."""
    rows = fact_rows(runs)
    kinds = ["differs" if len(set(row[1:])) > 1 and row[0] != "folder" else "" for row in rows]
    return table(["", *names(runs)], rows, kinds=kinds)


def names(runs: Sequence[RunRecord]) -> list[str]:
    """Columns' heads."""
    return [run.name for run in runs]


def values_table(heads: Sequence[str], rows: Sequence[Sequence[str]], most: int = 400) -> str:
    """Folded numbers, one row a step; of many steps every n-th."""
    every = -(-len(rows) // most) if rows else 1
    said = "Values step by step" + (f": every {every}th of {len(rows)}" if every > 1 else "")
    return folded(said, table(heads, rows[::every], numbers=range(len(heads))))
