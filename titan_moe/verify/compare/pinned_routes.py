"""Comparisons with pinned routes: all runs send each token to the experts that the baseline chose
(debug.routing_record, debug.routing_replay), so that what differs is arithmetic alone.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from titan_moe.config.job_config import JobConfig
from titan_moe.config.training_stages import tokens_per_step, training_stages
from titan_moe.debug.routing_record import Dims, form_of_keys
from titan_moe.debug.routing_trace import FLIPS_FILE, trace_dims
from titan_moe.metrics.jsonl import read_json_lines
from titan_moe.models.hf import model_of_job
from titan_moe.verify.compare.records import Array, RunRecord

ROUTES = "routes"
"""The folder of a run's routing record, in the run's own."""


def routing_problems(
    baseline: JobConfig, candidate: JobConfig, steps: int, num_records: int, out: Path
) -> list[str]:
    """Returns a line for everything that keeps the candidate from following the baseline.

    Args:
        num_records: runs of so many steps that record their routes below `out`.
    """
    pair = baseline, candidate
    if given := next(filter(None, (job.debug.routing for job in pair)), None):
        return [f"--pin-routing: {given} pins routes already: choose one"]
    if any(model_of_job(job.model).moe is None for job in pair):
        return ["--pin-routing: a model without experts has no routes: leave it out"]
    dims = [trace_dims(job, model_of_job(job.model)) for job in pair]
    lines = [
        f"--pin-routing: {name} is {ours} in the baseline, {theirs} in the candidate: choose two "
        "runs with the same experts"
        for name, ours, theirs in zip(Dims._fields, *dims, strict=True)
        if ours != theirs
    ]
    needed, available = num_records * steps * record_bytes(baseline), shutil.disk_usage(out).free
    if needed > available:
        lines.append(
            f"--pin-routing: the routes of {num_records} runs take {needed / 1e9:,.3g} GB, {out} "
            f"has {available / 1e9:,.3g} GB free: train fewer --steps, or choose another --out"
        )
    return lines


def record_bytes(job: JobConfig) -> int:
    """Returns the bytes that a routing record takes for a step, of the largest stage."""
    config = model_of_job(job.model)
    dims = trace_dims(job, config)
    per_token = len(dims.layers) * dims.top_k * 2
    if dims.index_top_k:
        seq_len = max(stage.training.seq_len for _, stage in training_stages(job))
        per_token += (config.num_layers + config.num_mtp_layers) * form_of_keys(seq_len).width
    return per_token * max(tokens_per_step(job).values())


class FlipSummary(NamedTuple):
    """Flips in all steps of some layers."""

    tokens: int
    share: float
    """Flipped tokens as a share of all tokens of these layers."""
    mean_margin: float
    """Margins are in standard deviations of a token's scores."""
    largest_margin: float


@dataclass(frozen=True)
class Flips:
    """Tokens that a run with pinned routes would itself have sent to other experts."""

    steps: Sequence[int]
    layers: Sequence[str]
    total_S: Array
    """Tokens of each step."""
    flipped_SL: Array
    mean_SL: Array
    """Mean margin of the flipped tokens (`debug.routing_trace`); 0 without any."""
    largest_SL: Array

    def summary(self, layers: slice = slice(None)) -> FlipSummary:
        """Returns the flips of some of the layers."""
        flipped_SL, mean_SL = self.flipped_SL[:, layers], self.mean_SL[:, layers]
        number, total = flipped_SL.sum(), self.total_S.sum() * flipped_SL.shape[1]
        mean = (mean_SL * flipped_SL).sum() / max(number, 1)
        largest = self.largest_SL[:, layers].max()
        return FlipSummary(int(number), float(number / total), float(mean), float(largest))


def read_flips(run: RunRecord) -> Flips:
    """Reads a run's flips."""
    assert run.folder is not None
    lines = read_json_lines(run.folder / FLIPS_FILE)
    layers = list(lines[0]["margins"])
    flipped_SL = np.array([[line["tokens"][layer] for layer in layers] for line in lines])
    margins_SL2 = np.array([[line["margins"][layer] for layer in layers] for line in lines])
    total_S = np.array([float(line["queries"]) for line in lines])
    steps = [line["step"] for line in lines]
    return Flips(steps, layers, total_S, flipped_SL, margins_SL2[..., 0], margins_SL2[..., 1])


FLIP_HEADS = ("layer", "flipped", "% of tokens", "control runs, %", "mean margin", "largest margin")


def flip_rows(flips: Sequence[Flips]) -> list[list[str]]:
    """Returns the candidate's flips, which come first, in the columns of FLIP_HEADS: those of all
    layers, then those of each."""
    rows = []
    for i, name in enumerate(["all", *flips[0].layers] if flips else []):
        own, *others = (each.summary(slice(i - 1, i) if i else slice(None)) for each in flips)
        shares = [100 * each.share for each in others]
        between = f"{min(shares):.2g} to {max(shares):.2g}" if shares else "none"
        margins = f"{own.mean_margin:.2g}", f"{own.largest_margin:.2g}"
        rows.append([name, f"{own.tokens:,}", f"{100 * own.share:.2g}", between, *margins])
    return rows
