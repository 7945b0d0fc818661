"""Cards of benchmarks: what ran where and how fast, beside the published figure that it mirrors."""

import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.config.parse import as_toml, load_job, resolve, tomllib
from titan_moe.metrics.jsonl import read_json_lines
from titan_moe.verify.compare.records import RunRecord
from titan_moe.verify.report.sections import ABSENT, differing_keys, layout_words

_UNMIRRORED = ("job.", "metrics.", "profiling.")
"""Tables that say nothing about what is trained."""


@cache
def rows() -> list[dict[str, Any]]:
    """Returns the rows of published.toml, whose head says where they are from."""
    text = (files("titan_moe.verify.report") / "published.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["row"]


def card(run: RunRecord) -> dict[str, Any]:
    """Returns a run's figures, medians over the later half of its logged steps, and "published",
    the row of its model, routing and number of ranks, or None.

    Raises ConfigError for a run without run.json or config.toml.
    """
    facts, config = run.facts, run.config
    if not (facts and config) or run.folder is None:
        raise ConfigError([f"{run.name}: a card needs run.json and config.toml beside the metrics"])
    lines = [x for x in read_json_lines(run.folder / "metrics.jsonl") if "tokens_per_second" in x]
    lines = lines[len(lines) // 2 :]
    if not lines:
        raise ConfigError([f"{run.name}: no step has logged its speed: set metrics.log_freq = 1"])
    routing = "forced" if config["debug"]["moe_force_load_balance"] else "natural"
    row = next((each for each in rows() if _mirrors(run, routing, each)), None)
    code = facts.get("code", {})
    known = {key for line in lines for key in line}
    memory = "memory/used_gib" if "memory/used_gib" in known else "memory/peak_gib"
    return {
        "model": f"{config['model']['name']} {config['model']['flavor']}",
        "device": f"{facts['world_size']} x {facts['device']}",
        "torch": facts["torch"],
        "commit": code.get("commit", "unknown") + (", changed" if code.get("changed") else ""),
        "layout": layout_words(run),
        "routing": routing,
        "attention counted": "causal, across documents"
        + (" though they are masked" if config["training"]["mask_documents"] else ""),
        "steps": f"{lines[0]['step']} to {lines[-1]['step']}",
        "tokens_per_second": _median(lines, "tokens_per_second_per_device"),
        "tflops": _median(lines, "tflops_per_device"),
        "mfu": _median(lines, "mfu") if "mfu" in known else None,
        "peak_gib": max(line[memory] for line in lines),
        "published": row,
        "command": _command(run, row),
    }


def _median(lines: Sequence[Mapping[str, Any]], key: str) -> float:
    return statistics.median(line[key] for line in lines)


def _mirrors(run: RunRecord, routing: str, row: Mapping[str, Any]) -> bool:
    ranks = int(row["gpus"].split()[0].replace(",", ""))
    if (ranks, row["routing"]) != (run.facts["world_size"], routing):
        return False
    model = load_job(["--config", row["config"]]).model
    return (model.name, model.flavor) == (
        run.config["model"]["name"],
        run.config["model"]["flavor"],
    )


def _command(run: RunRecord, row: Mapping[str, Any] | None) -> str:
    """Returns a command that trains as the run did. With a row it names the shipped file, and the
    keys that the run has set otherwise."""
    config, overrides = f"{run.folder}/config.toml", []
    if row is not None:
        config = row["config"]
        job = resolve(load_job(["--config", config]), run.facts["world_size"])
        shipped = replace(run, config=tomllib.loads(as_toml(job)))
        for key, value, _ in differing_keys([run, shipped]):
            if value != ABSENT and not key.startswith(_UNMIRRORED):
                overrides += [f"--{key}", value]
    words = ["titan-moe", "train", "--ranks", str(run.facts["world_size"]), "--config", config]
    return shlex.join(words + overrides)


def markdown(cards: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a page of cards, a column each, by the names of their runs."""
    table: dict[str, list[str]] = {}
    for each in cards.values():
        for key, value in _cells(each).items():
            table.setdefault(key, []).append(value)
    lines = ["| | " + " | ".join(cards) + " |", "|---|" + "---|" * len(cards)]
    lines += [f"| {key} | {' | '.join(values)} |" for key, values in table.items()]
    commands = [f"# {name}\n{each['command']}" for name, each in cards.items()]
    return "\n".join([*lines, "", "```bash", *commands, "```", ""])


def _cells(found: Mapping[str, Any]) -> dict[str, str]:
    names = (
        "model",
        "device",
        "torch",
        "commit",
        "layout",
        "routing",
        "attention counted",
        "steps",
    )
    cells = {name: found[name] for name in names}
    cells["tokens/s per device"] = f"{found['tokens_per_second']:,.0f}"
    cells["TFLOPS per device"] = f"{found['tflops']:,.2f}"
    cells["MFU"] = ABSENT if found["mfu"] is None else f"{found['mfu']:.1%}"
    cells["memory, GiB"] = f"{found['peak_gib']:.1f}"
    row, ratio = found["published"], ABSENT
    if row is None:
        cells["published"] = "no published row"
    else:
        cells["published"] = f"{row['tokens_per_second']:,} tokens/s on {row['gpus']} ({row['by']})"
        if row["gpus"].split()[-1] in found["device"]:
            ratio = f"{found['tokens_per_second'] / row['tokens_per_second']:.2f}"
    cells["of published"] = ratio
    return cells
