"""The table of docs/parity.md: every case, and how far it was from `transformers` when measured.

    titan-moe verify parity --seeds 5 --out outputs/parity
    python -m scripts.docs.parity outputs/parity/parity.json

The second command keeps the worst of the seeds, in docs/results/parity.json.
"""

import json
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from titan_moe.runtime.revision import running_code
from titan_moe.verify.gradients.compare import worst
from titan_moe.verify.parity.cases import cases

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "parity.json"
_MEASURED = ("logits", "gradient", "losses", "exported")
_HEAD = """\
| family | option | f32: logits | gradient | losses | export | f64: logits | gradient | losses |
|---|---|--:|--:|--:|--:|--:|--:|--:|"""


def table() -> str:
    """A row for each case that the code has; one that was not measured says so."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = []
    for case in cases():
        measured = found["cases"].get(str(case), {})
        cells = [
            f"{value:.1e}"
            for dtype in ("float32", "float64")
            for value in measured.get(dtype, {}).values()
        ]
        cells = cells or ["not measured", *[""] * 6]
        rows.append(f"| {case.family} | {case.option} | {' | '.join(cells)} |")
    return (
        f"{len(rows)} cases, worst of {found['seeds']} seeds, measured {found['date']} at commit "
        f"{found['commit']} with torch {found['torch']} and transformers {found['transformers']} "
        f"by `{found['command']}`.\n\n" + "\n".join([_HEAD, *rows])
    )


def worst_of_seeds(records: list[dict[str, Any]]) -> dict[str, Any]:
    """What `titan-moe verify parity` wrote, as kept: by case, type and quantity."""
    found: dict[str, Any] = {}
    for each in records:
        case = found.setdefault(f"{each['family']}: {each['option']}", {})
        kept = case.setdefault(each["dtype"], {})
        for name in _MEASURED:
            if each[name] is not None:
                kept[name] = worst([each[name], kept.get(name, 0.0)])
    return found


def main(argv: list[str]) -> int:
    records = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    found = {
        "command": "titan-moe verify parity --seeds 5",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": str(running_code().get("commit", "unknown"))[:7],
        "torch": version("torch"),
        "transformers": version("transformers"),
        "seeds": 1 + max(each["seed"] for each in records),
        "cases": worst_of_seeds(records),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
