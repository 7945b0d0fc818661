"""Mistakes of other projects, planted, and the trainings that docs/museum.md shows of them."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from tests.support.gates import KINDS
from tests.support.paths import DEBUG_CONFIGS
from tests.support.planting import Bug, planted_bugs
from tests.support.trainings import train_curve
from titan_moe.metrics.jsonl import read_json_lines
from titan_moe.verify.compare.control_runs import control_specs
from titan_moe.verify.compare.records import RunRecord, read_run
from titan_moe.verify.compare.run_spec import RunSpec, Words, words_of
from titan_moe.verify.layouts.layouts import parse

HALLS = "divisors and sums", "norms", "routing and balance", "optimizer", "lost gradients"
STEPS, SEEDS = 60, 8
_LAYERS, _ORDERS = 3, 6
_KEYS = words_of("training", steps=STEPS, local_batch_size=8) + words_of("debug", seed=1)
_KEYS += words_of("lr_scheduler", total_steps=100)
_MICROBATCHES = words_of("training", local_batch_size=4)


def exhibits() -> dict[str, Bug]:
    """Returns the planted mistakes that other projects had, by name, hall after hall."""
    bugs = [each for each in planted_bugs().items() if each[1].museum]
    return dict(sorted(bugs, key=lambda each: HALLS.index(each[1].hall)))


class Run(NamedTuple):
    """A training that is made once."""

    spec: RunSpec
    words: Words = ()
    bug: Bug | None = None

    def record(self, folder: Path) -> RunRecord:
        log = folder / "metrics.jsonl"
        if not log.exists() or len(read_json_lines(log)) < STEPS:
            shutil.rmtree(folder, ignore_errors=True)
            train_curve(self.spec, folder, self.words, bug=self.bug, num_layers=_LAYERS)
        return read_run(folder).at(range(1, STEPS + 1))


def key(name: str, bug: Bug) -> str:
    """Returns a name for files that changes with the mistake and its layout."""
    return f"{name} {crc32(repr(bug[:4]).encode()):08x}"


def all_runs(bugs: Mapping[str, Bug]) -> dict[str, Run]:
    """Returns the right trainings of each kind, and those with mistakes, by folder."""
    runs, specs = {}, {}
    for kind in sorted({bug.kind for bug in bugs.values()}):
        words = sum((words_of(table, **keys) for table, keys in KINDS[kind].items()), _KEYS)
        spec = RunSpec(config=DEBUG_CONFIGS / "compare.toml", ranks=1, overrides=words)
        seeds = [Run(spec, words_of("debug", seed=n + 2)) for n in range(SEEDS)]
        orders = [Run(*control) for control in control_specs(spec, _ORDERS, num_gpus=0)]
        runs |= {f"{kind} right": Run(spec)} | {f"{kind} seeds {n}": r for n, r in enumerate(seeds)}
        runs |= {f"{kind} orders {n}": run for n, run in enumerate(orders)}
        specs[kind] = spec
    for name, bug in bugs.items():
        laid_out = specs[bug.kind].with_layout(parse(bug.caught_on))
        runs[key(name, bug)] = Run(laid_out, _MICROBATCHES, bug)
    return runs
