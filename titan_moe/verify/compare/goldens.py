"""Golden files: what one training measured, with the band of its control runs, kept in the
repository and compared with later code.

A golden is a folder, with one file for each minor version of torch and capability of the device:
NAME/torch-2.13-cpu-AVX512.json. Rounding differs between them, so each has curves of its own.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titan_moe.config.errors import ConfigError
from titan_moe.runtime.device import describe_device, pick_device
from titan_moe.runtime.launch import Launch, count_gpus
from titan_moe.verify.compare.noise.band import Band, quantities_of
from titan_moe.verify.compare.records import COMPARED, RunRecord


@dataclass(frozen=True)
class Golden:
    """The content of a golden file."""

    path: Path
    run: RunRecord
    """The run that the file holds, with its resolved configuration and its facts."""
    controls: list[RunRecord]
    """Curves of its control runs."""
    history: list[dict[str, str]]
    """Why it was made and changed: {"date", "reason", "code", "torch"}, the latest last."""

    def caveats(self) -> list[str]:
        """A line if the golden was made on another device or with another torch."""
        here = golden_key()
        if self.path.stem == here:
            return []
        return [f"the golden {self.path} is of {self.path.stem}; this machine is {here}"]

    def write_config(self, path: Path) -> Path:
        """Writes the golden's configuration as a TOML file."""
        import tomli_w

        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(tomli_w.dumps(dict(self.run.config)), encoding="utf-8")
        return path


def this_device() -> torch.device:
    """The device that run_train.sh would compute on."""
    return pick_device(Launch(), count_gpus(os.environ))


def golden_key() -> str:
    """This machine's key of golden files: torch's minor version, the device and its capability."""
    version = ".".join(torch.__version__.split(".")[:2])
    facts = describe_device(this_device())
    return f"torch-{version}-{facts['device']}-{facts['capability']}".replace(" ", "_")


def is_golden(path: Path) -> bool:
    """Says whether a path names a golden: a .json file, or a folder of keyed ones."""
    return path.suffix == ".json" or (path.is_dir() and any(path.glob("torch-*.json")))


def find_golden(path: Path) -> Golden:
    """A golden by its file, or the one of a folder that is keyed to this machine.

    Raises ConfigError where the folder has none for it, and for files that are no golden.
    """
    if path.is_dir():
        here = path / f"{golden_key()}.json"
        if not here.is_file():
            known = ", ".join(sorted(each.stem for each in path.glob("torch-*.json")))
            raise ConfigError(
                f"{path} has no golden for {here.stem}, only {known}: make one with "
                f"--update-golden {path} --reason ..., or name a file to compare all the same"
            )
        path = here
    return _read(path)


def save_golden(
    folder: Path, run: RunRecord, controls: Sequence[RunRecord], *, reason: str
) -> Path:
    """Write or replace a golden's file for this machine; its earlier reasons are kept.

    Raises ConfigError without what a golden must hold.
    """
    ran = run.facts["device"], run.facts["capability"]
    here = tuple(describe_device(this_device()).values())
    if ran != here:
        raise ConfigError(
            f"{run.name} ran on {ran[0]} ({ran[1]}): make its golden there, not on {here[0]}"
        )
    Band([run, *controls], quantities_of(run))  # Raises for runs that make no band.
    path = folder / f"{golden_key()}.json"
    history = _read(path).history if path.is_file() else []
    entry = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "reason": reason.strip(),
        "code": str(run.facts["code"].get("commit", "unknown")),
        "torch": torch.__version__,
    }
    config = {table: dict(keys) for table, keys in run.config.items()}
    config["job"] = {"description": config["job"]["description"]}
    config.pop("checkpoint", None)  # It names folders of another machine.
    facts = {key: run.facts[key] for key in sorted(run.facts) if key not in ("code", "told")}
    found = {
        "format": 1,
        "history": [*history, entry],
        "config": config,
        "facts": facts,
        "steps": list(run.steps),
        "data": list(run.data),
        "curve": _as_json(run),
        "repeats": [_as_json(control) for control in controls],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(_compact(found), encoding="utf-8")
    return path


def _read(path: Path) -> Golden:
    try:
        found = json.loads(path.read_bytes())
        run = _curves(found, found["curve"], f"golden {path.parent.name}")
        controls = [
            _curves(found, each, f"control {number}")
            for number, each in enumerate(found["repeats"], 1)
        ]
        return Golden(path, run, controls, found["history"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: no golden file: {type(error).__name__}: {error}") from None


def _as_json(run: RunRecord) -> dict[str, Any]:
    return {
        **{key: run.scalars[key].tolist() for key in COMPARED},
        "loads": {layer: rows.astype(int).tolist() for layer, rows in run.loads.items()},
    }


def _curves(file: dict[str, Any], curves: dict[str, Any], name: str) -> RunRecord:
    """Makes a record of the curves of one run in a golden file."""
    scalars = {key: np.array(curves[key]) for key in COMPARED}
    loads = {layer: np.array(rows, dtype=np.float64) for layer, rows in curves["loads"].items()}
    about = file["data"], file["facts"], file["config"]
    return RunRecord(name, file["steps"], scalars, loads, *about)


def _compact(found: dict[str, Any]) -> str:
    """Returns JSON with a line for each entry and control run: a change of one changes one line."""
    lines = []
    for key, value in found.items():
        text = json.dumps(value)
        if key == "repeats":
            text = "[\n" + ",\n".join(json.dumps(each) for each in value) + "\n]"
        lines.append(f'"{key}": {text}')
    return "{\n" + ",\n".join(lines) + "\n}\n"
