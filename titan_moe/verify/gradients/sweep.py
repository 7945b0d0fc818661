"""Many layouts through the gate: results as they come, kept to be resumed, and as a page."""

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from titan_moe.config.job_config import JobConfig
from titan_moe.metrics.jsonl import read_json_lines
from titan_moe.runtime.device import describe_device
from titan_moe.runtime.revision import PACKAGE, code_in_words, files_hash, running_code
from titan_moe.verify.gradients.gate import Gate, Result
from titan_moe.verify.layouts.layouts import AXES, OPTIONS, Layout
from titan_moe.verify.report.render import render

RESULTS_FILE = "results.jsonl"


def code_fingerprint(job: JobConfig, device: str) -> str:
    """Changes with the configuration, every line of the package, torch, and "cpu" or "cuda"."""
    said = f"{job.model_dump_json()} torch {torch.__version__} {device}"
    said += files_hash(PACKAGE)
    return hashlib.blake2b(said.encode(), digest_size=12).hexdigest()


def sweep(gate: Gate, tasks: Sequence[tuple[Layout, str]], folder: Path) -> Iterator[Result]:
    """Verifies each (layout, dtype), and yields each result once it is written to the folder;
    passed ones that `folder` knows from the same code are not repeated."""
    fingerprint = code_fingerprint(gate.job, gate.device)
    path = folder / RESULTS_FILE
    path.touch()
    # The fingerprint does not cover modules from outside.
    loaded = [] if gate.job.job.imports else read_json_lines(path)
    same = [Result(**fields) for fields in loaded if fields.pop("code", None) == fingerprint]
    known = {(result.layout, result.dtype): result for result in same if result.passed}
    with path.open("a", encoding="utf-8") as file:
        for layout, dtype in tasks:
            result = known.get((str(layout), dtype))
            if result is None:
                result = gate.verify(layout, dtype=dtype)
                file.write(json.dumps({"code": fingerprint, **asdict(result)}) + "\n")
                file.flush()
            yield result


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Counts by status, the worst error and what all layouts took; of one result or more."""
    by_status = Counter(result.status for result in results)
    worst = max(results, key=lambda result: result.worst)
    return {
        "layouts": len(results),
        **{status: by_status[status] for status in ("passed", "failed", "refused")},
        "tensors_compared": sum(result.num_compared for result in results),
        "worst_error": worst.worst,
        "worst_layout": worst.layout,
        "worst_tensor": worst.worst_tensor,
        "seconds": round(sum(result.seconds for result in results), 1),
    }


def gate_page(title: str, rows: Sequence[tuple[Result, Layout]], facts: Mapping[str, Any]) -> str:
    """A table of layouts with a filter, sorted by a click on a column; failures with reasons.

    Args:
        facts: the summary of the results.
    """
    machine = describe_device(torch.device("cpu"))
    made = (
        f"{code_in_words(running_code())}, torch {torch.__version__}, on {platform.node()} "
        f"({platform.machine()}, {machine['capability']}), {datetime.now():%Y-%m-%d %H:%M}."
    )
    return render(
        "gate.html",
        title=title,
        axes=AXES,
        options=OPTIONS,
        rows=rows,
        facts=facts,
        made=made,
    )
