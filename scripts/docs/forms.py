"""The table in docs/models.md of published config.json files, and what becomes of each.

The files are `OWNER--NAME.json` in a folder beside the repository. Where that is missing, the table
stays as it is.
"""

import json
import shutil
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

from titan_moe.config.errors import ConfigError
from titan_moe.models.hf import CONFIG, model_of, quantization, weight_block

PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "published_configs"
_HEAD = "| `model_type` | published models | what becomes of them |\n|---|---|---|"


def table() -> str | None:
    """Returns a row for each model_type and end; None where there are no files."""
    if not PUBLISHED.is_dir():
        return None
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for file in sorted(PUBLISHED.glob("*.json")):
        kind = json.loads(file.read_text(encoding="utf-8"))["model_type"]
        rows[kind, becomes(file)].append(file.stem.partition("--")[2])
    lines = [f"| `{kind}` | {', '.join(names)} | {end} |" for (kind, end), names in rows.items()]
    return "\n".join([_HEAD, *sorted(lines)])


def becomes(file: Path) -> str:
    """Returns, in words, what a run does with a folder of this config.json."""
    with TemporaryDirectory() as folder:
        path = Path(folder, CONFIG)
        shutil.copyfile(file, path)
        settings = json.loads(path.read_text(encoding="utf-8"))
        try:
            model = model_of(Path(folder))
        except ConfigError as error:
            return f"refused: {error.lines[0].removeprefix(f'{path}: ').partition(':')[0]}"
        trains = "its text trains" if model.wrapper else "trains"
        method = quantization(settings).get("quant_method")
        try:
            weight_block(settings, path)
        except ConfigError:
            return f"{trains} from other weights: quant_method={method!r} is refused"
        return f"`{model.family}`: {trains}" + (f", read out of {method}" if method else "")
