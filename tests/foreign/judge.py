"""Prints what titan-moe verify foreign says of every run in a folder.

python judge.py OUT MODELS    OUT/RUN of the steps beside it; a run's name begins with its family
"""

import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from titan_moe.cli.main import main as titan_moe


def verdict(folder: Path, model: Path) -> str:
    said = io.StringIO()
    with redirect_stdout(said):
        code = titan_moe(["verify", "foreign", str(folder), "--model", str(model), "--json"])
    if code not in (0, 1):
        return f"cannot be compared (exit code {code}): {said.getvalue()}"
    return "; ".join(short(part) for part in json.loads(said.getvalue())[1:])


def short(part: dict[str, Any]) -> str:
    """Returns a part's name, the worst error if it agrees, else the worst tensor of each cause."""
    errors = [tensor["error"] for tensor in part["tensors"]]
    if part["agrees"]:
        return f"{part['name']} {max(errors):.1e}" if errors else part["name"]
    worst: dict[str, Any] = {}
    wrong = [tensor for tensor in part["tensors"] if tensor["cause"]]
    for tensor in sorted(wrong, key=lambda tensor: tensor["error"]):
        worst[tensor["cause"]] = tensor
    if not worst:
        return " ".join(" ".join(part["lines"]).split())
    causes = (
        f"{each['theirs']} x {each['ratio']:.6f} (error {each['error']:.1e}): {cause}"
        for cause, each in worst.items()
    )
    return f"{len(wrong)} of {len(errors)} {part['name']} differ, {', '.join(causes)}"


if __name__ == "__main__":
    for file in sorted(Path(sys.argv[1]).glob("*/foreign.json")):
        name = file.parent.name
        said = verdict(file.parent, Path(sys.argv[2], name.partition(".")[0]))
        print(f"{name:52} {said}", flush=True)
