"""The gate's results as one self-contained HTML page."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from titan_moe.verify.gradients.gate import Result
from titan_moe.verify.layouts.layouts import AXES, OPTIONS, Layout, parse
from titan_moe.verify.report.style import document

_STYLE = """
input { font: inherit; padding: .3rem .5rem; width: 28rem; max-width: 100%; margin: .8rem 0 }
th { position: sticky; top: 0; background: Canvas; cursor: pointer }
td.one { opacity: .35 }
td:last-child { overflow-wrap: anywhere }
tr.why td { font: 12px/1.5 ui-monospace, monospace; white-space: pre-wrap; color: var(--bad) }
"""
_SCRIPT = """
const rows = [...document.querySelectorAll('tbody')];
const table = document.querySelector('table'), count = document.querySelector('#shown');
document.querySelector('input').oninput = event => {
  const words = event.target.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let shown = 0;
  for (const row of rows) {
    row.hidden = !words.every(word => row.dataset.text.includes(word));
    shown += !row.hidden;
  }
  count.textContent = shown;
};
document.querySelectorAll('th').forEach((head, column) => head.onclick = () => {
  const key = row => row.rows[0].cells[column].dataset.key;
  const down = head.dataset.down = head.dataset.down === '1' ? '' : '1';
  rows.sort((a, b) => {
    const [x, y] = [key(a), key(b)], order = isNaN(x) ? x.localeCompare(y) : x - y;
    return down ? -order : order;
  });
  table.append(...rows);
});
"""


def page(title: str, results: Sequence[Result], facts: Mapping[str, Any]) -> str:
    """A table of layouts with a filter, sorted by a click on a column; failures with reasons."""
    heads = [*AXES, *OPTIONS, "type", "result", "worst error", "tensors", "seconds", "worst tensor"]
    said = f"{facts['passed']} of {facts['layouts']} layouts pass."
    if facts["failed"] or facts["refused"]:
        said += f" {facts['failed']} fail, {facts['refused']} are refused by the checks."
    measured = (
        f"{facts['tensors_compared']:,} tensors compared, each rank's own parts against the "
        f"one-process reference; largest relative error {facts['worst_error']:.1e} "
        f"({facts['worst_tensor']} in {facts['worst_layout']}). {facts['seconds']:.0f} s."
    )
    head = "".join(f"<th>{_breakable(name)}</th>" for name in heads)
    body = "".join(_row(result) for result in results)
    shown = (
        f"<h1>{escape(title)}</h1><p>{escape(said)}</p><p>{escape(measured)}</p>"
        f"<input placeholder='filter: failed tp=2 ulysses' aria-label=filter> "
        f"<span id=shown>{len(results)}</span> shown"
        f"<div class=wide><table><thead><tr>"
        f"{head}</tr></thead>{body}</table></div>"
    )
    return document(title, shown, style=_STYLE, script=_SCRIPT)


def _row(result: Result) -> str:
    layout = parse(result.layout)
    cells = [
        f"<td class='n{' one' if layout.size(axis) == 1 else ''}' data-key={layout.size(axis)}>"
        f"{layout.size(axis)}</td>"
        for axis in AXES
    ]
    cells += [_text(_option(layout, option)) for option in OPTIONS]
    cells.append(_text(result.dtype))
    cells.append(f"<td class={result.status} data-key={result.status}>{result.status}</td>")
    cells.append(f"<td class=n data-key={result.worst}>{result.worst:.1e}</td>")
    cells.append(f"<td class=n data-key={result.num_compared}>{result.num_compared:,}</td>")
    cells.append(f"<td class=n data-key={result.seconds}>{result.seconds:.1f}</td>")
    cells.append(_text(result.worst_tensor))
    why = ""
    if result.lines:
        lines = escape("\n".join(result.lines))
        why = f"<tr class=why><td colspan={len(cells)}>{lines}</td></tr>"
    words = " ".join([result.layout.replace(",", " "), result.dtype, result.status])
    words = escape(f"{words} {result.worst_tensor}".lower(), quote=True)
    return f'<tbody data-text="{words}"><tr>{"".join(cells)}</tr>{why}</tbody>'


def _option(layout: Layout, option: str) -> str:
    return str(getattr(layout, option)) if layout.has(option) else ""


def _breakable(name: str) -> str:
    return escape(name).replace("_", "_<wbr>")


def _text(text: str) -> str:
    return f'<td data-key="{escape(text, quote=True)}">{escape(text)}</td>'
