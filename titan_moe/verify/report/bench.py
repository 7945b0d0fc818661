"""Cards of benchmarks: what ran where and how fast, beside the published figure that it mirrors."""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from titan_moe.config.parse import as_toml, load_job, resolve, tomllib
from titan_moe.verify.compare.records import RunRecord
from titan_moe.verify.report.pages import ABSENT, differing_keys, layout_words

_UNMIRRORED = ("job.", "metrics.", "profiling.")
"""Tables that say nothing about what is trained."""


@cache
def rows() -> list[dict[str, Any]]:
    """Returns the rows of published.toml, whose head says where they are from."""
    text = (files("titan_moe.verify.report") / "published.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["row"]


def card(run: RunRecord) -> dict[str, Any]:
    """Returns a run's facts, figures and command. Figures are medians over the later half of its
    logged steps; None where they are unknown, and "of published" on another kind of GPU."""
    facts, config = run.facts, run.config
    late = run.at(run.steps[len(run.steps) // 2 :])

    def median(key: str) -> float | None:
        return float(np.median(late.scalars[key])) if key in late.scalars else None

    code, rate = facts["code"], median("tokens_per_second_per_device")
    routing = "forced" if config["debug"]["moe_force_load_balance"] else "natural"
    routing = config["debug"].get("router_load") or routing
    row = next((each for each in rows() if _mirrors(run, routing, each)), None)
    published, ratio = "no published row", None
    if row is not None:
        published = f"{row['tokens_per_second']:,} tokens/s on {row['gpus']} ({row['by']})"
        if rate and row["gpus"].split()[-1] in facts["device"]:
            ratio = rate / row["tokens_per_second"]
    masks = " though they are masked" * config["training"]["mask_documents"]
    return {
        "model": f"{config['model']['name']} {config['model']['flavor']}",
        "device": f"{facts['world_size']} x {facts['device']}",
        "torch": facts["torch"],
        "commit": code.get("commit", "unknown") + ", changed" * code.get("changed", False),
        "layout": layout_words(run),
        "routing": routing,
        "attention counted": f"causal, across documents{masks}",
        "steps": f"{late.steps[0]} to {late.steps[-1]}",
        "tokens/s per device": rate,
        "TFLOPS per device": median("tflops_per_device"),
        "MFU": median("mfu"),
        "GiB": float(late.scalars.get("memory/used_gib", late.scalars["memory/peak_gib"]).max()),
        "published": published,
        "of published": ratio,
        "command": _command(run, row),
    }


def _mirrors(run: RunRecord, routing: str, row: Mapping[str, Any]) -> bool:
    ranks, model = int(row["gpus"].split()[0].replace(",", "")), run.config["model"]
    if (ranks, row["routing"]) != (run.facts["world_size"], routing):
        return False
    mirrored = load_job(["--config", row["config"]]).model
    return (mirrored.name, mirrored.flavor) == (model["name"], model["flavor"])


def _command(run: RunRecord, row: Mapping[str, Any] | None) -> str:
    """Returns a command that trains as the run did. With a row it names the shipped file, and the
    keys that the run has set otherwise."""
    ranks, config, overrides = run.facts["world_size"], f"{run.folder}/config.toml", []
    if row is not None:
        config = row["config"]
        job = resolve(load_job(["--config", config]), ranks)
        shipped = replace(run, config=tomllib.loads(as_toml(job)))
        for key, value, _ in differing_keys([run, shipped]):
            if value != ABSENT and not key.startswith(_UNMIRRORED):
                overrides += [f"--{key}", value]
    return shlex.join(["titan-moe", "train", "--ranks", str(ranks), "--config", config, *overrides])


def markdown(title: str, cards: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a page of cards, a column each, by the names of their runs."""
    keys = [key for key in next(iter(cards.values())) if key != "command"]
    table = [["", *cards], ["---"] * (len(cards) + 1)]
    table += [[key, *(_cell(each[key]) for each in cards.values())] for key in keys]
    commands = [f"# {name}\n{each['command']}" for name, each in cards.items()]
    lines = [f"| {' | '.join(line)} |" for line in table]
    return "\n".join([f"# {title}", "", *lines, "", "```bash", *commands, "```", ""])


def _cell(value: str | float | None) -> str:
    if value is None or isinstance(value, str):
        return value or ABSENT
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
