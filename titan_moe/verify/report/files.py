"""A report on disk: the page, the picture and the figures."""

import json
from pathlib import Path

from titan_moe.verify.compare.comparison import Comparison
from titan_moe.verify.report.page import comparison_page
from titan_moe.verify.report.png import comparison_png


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """report.html, report.png and comparison.json in a folder; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    html, png, figures = (
        folder / name for name in ("report.html", "report.png", "comparison.json")
    )
    html.write_text(comparison_page(comparison), encoding="utf-8")
    comparison_png(comparison, png)
    figures.write_text(json.dumps(comparison.as_json(), indent=1), encoding="utf-8")
    return [html, png, figures]
