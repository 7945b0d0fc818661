"""Measures a device, and the first layouts of a plan, on this machine for `titan-moe plan`."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from titan_moe.cli.command import Answer, write_json
from titan_moe.config.errors import ConfigError, as_written
from titan_moe.runtime.errors import reason
from titan_moe.runtime.gpus import Device
from titan_moe.runtime.launch import count_gpus

if TYPE_CHECKING:
    from titan_moe.planner.search import Question


def calibrated(path: Path) -> Answer:
    """Measures this machine and writes its device to a file. Raises ConfigError for its name."""
    from titan_moe.profiling.calibrate import calibrate

    if path.suffix != ".json":
        raise ConfigError(f"--calibrate {path}: name a file that ends in .json")
    device = asdict(calibrate())
    write_json(path, device)
    return Answer(device, [f"{name} {value}" for name, value in device.items()] + [str(path)])


def read_device(path: str) -> Device:
    """Reads a file of --calibrate. Raises ConfigError."""
    remedy = f"write it with titan-moe plan --calibrate {path}"
    try:
        values = json.loads(Path(path).expanduser().read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--gpu {path}: {reason(error)}: {remedy}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"--gpu {path}: is no table of figures: {remedy}")
    for name in sorted(values.keys() ^ {field.name for field in fields(Device)}):
        state = "is no figure of a device" if name in values else "is missing"
        raise ConfigError(f"--gpu {path}: {name} {state}: {remedy}")
    for name, value in values.items():
        is_number = type(value) in (int, float) and 0 < value < math.inf
        if not (is_number or (name, type(value)) == ("name", str) or (name, value) == ("cores", 0)):
            shown = as_written(value)
            raise ConfigError(f"--gpu {path}: {name}={shown} must be a positive number: {remedy}")
    return Device(**values)


def need_ranks(question: "Question") -> None:
    """Raises ConfigError if this machine has too few GPUs; a CPU has any number of ranks."""
    gpus = count_gpus(os.environ)
    if gpus < question.ranks and (gpus or not question.device.cores):
        remedy = f"choose --gpus {gpus}" if gpus else "name a CPU, --gpu with a file of --calibrate"
        raise ConfigError(f"--gpus {question.ranks}: --measure finds {gpus} GPUs here: {remedy}")


def measure(
    out: Path, steps: int, ranks: int, layouts: Sequence[tuple[str, float]]
) -> Iterator[dict[str, Any]]:
    """Trains layouts from their files in `out`, one after the other. Yields the tokens a second and
    GPU that each reaches beside those expected; None with a reason where it fails.

    Args:
        layouts: degrees, and the tokens a second and GPU that are expected.
    """
    from titan_moe.verify.compare.launch import Launcher, TrainingError, workplace
    from titan_moe.verify.compare.run_spec import RunSpec, words_of

    words = (
        *words_of("training", steps=steps, dataset="synthetic"),
        *words_of("model", tokenizer_path="bytes"),
        *words_of("metrics", log_freq=1),
        *words_of("checkpoint", enable=False),
    )
    launcher = Launcher(out)
    with workplace(out):
        for number, (degrees, expected) in enumerate(layouts, 1):
            print(f"measures {number} of {len(layouts)}: {degrees}", flush=True)
            spec = RunSpec(config=(out / f"{number}.toml").resolve(), ranks=ranks)
            row: dict[str, Any] = {"degrees": degrees, "expected": expected, "measured": None}
            try:
                place = launcher.place(spec, f"measured-{number}", *words, fresh=True)
                launcher.train(place)
                rates = launcher.read(place).scalars["tokens_per_second_per_device"]
                row["measured"] = median(rates[len(rates) // 2 :].tolist())
            except (TrainingError, ConfigError) as error:
                lines = str(error).splitlines()
                row["reason"] = next((each for each in lines[1:] if "error" in each), lines[0])
            yield row


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the lines of measured layouts, fastest first."""
    lines = ["", f"{'measured':>14}{'expected':>12}{'ratio':>8}  tokens/s/GPU, fastest first"]
    for row in sorted(rows, key=lambda row: -(row["measured"] or 0.0)):
        measured, expected = row["measured"], row["expected"]
        shown = f"{measured:>14,.0f}" if measured else f"{'failed':>14}"
        ratio = f"{measured / expected:>8.2f}" if measured else f"{'':>8}"
        more = f": {row['reason']}" if not measured else ""
        lines.append(f"{shown}{expected:>12,.0f}{ratio}  {row['degrees']}{more}")
    return lines
