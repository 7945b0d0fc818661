"""The jobs that compare.py starts, and what it measures of them from outside.

Both programs are measured in the same way: a step ends when its line is on their standard output,
and memory is what the kernel reports of their ranks at that moment.
"""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tomli_w

from scripts.bench.measure import TRAIN, run_job, torchrun
from scripts.bench.resident import ranks_memory, resident_mib
from titan_moe.models.hf import HFModel
from titan_moe.models.registry import model_config
from titan_moe.runtime.torchrun import allocators

SEQ_LEN = 256
GLOBAL_BATCH_SIZE = 8
TORCHTITAN = "torchtitan==0.2.2"
TRAINER = ("transformers==5.23.0", "accelerate==1.15.0")

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
_STEP = re.compile(r"\bstep:?\s+(\d+)(?:/\d+)?\s+loss:?\s+(\S+)")
_PARAMETERS = re.compile(r"size: ([\d,]+) total parameters")


@dataclass(frozen=True)
class Layout:
    """How many ranks a job has, and how many of them share the experts."""

    name: str
    num_ranks: int
    expert_parallel_degree: int


@dataclass(frozen=True)
class Model:
    """One network as both programs name it."""

    name: str
    family: str
    our_flavor: str
    their_flavor: str
    num_parameters: int
    lr: float


@dataclass
class Observed:
    """One run as measured from outside; lists have one value per step."""

    seconds: list[float] = field(default_factory=list)
    """From the launch to the step's end."""
    losses: list[float] = field(default_factory=list)
    resident_mib: list[float] = field(default_factory=list)
    """Of the largest rank."""
    peak_mib: float = 0.0
    """Of the largest rank, up to the last step."""
    num_parameters: int | None = None
    """As the program prints it, where it does."""

    def read(self, line: str, seconds: float, memory: Callable[[], list[dict[str, float]]]) -> None:
        """Take one line of output; of ranks that all print a step, the first counts."""
        if found := _PARAMETERS.search(line):
            self.num_parameters = int(found[1].replace(",", ""))
        found = _STEP.search(line)
        if found is None or int(found[1]) != len(self.seconds) + 1:
            return
        self.seconds.append(seconds)
        self.losses.append(float(found[2]))
        ranks = memory()
        before = self.resident_mib[-1] if self.resident_mib else 0.0
        self.resident_mib.append(max((rank["VmRSS"] for rank in ranks), default=before))
        self.peak_mib = max([self.peak_mib, *(rank["VmHWM"] for rank in ranks)])


@dataclass
class Start:
    """A job that only starts: seconds from the launch, and a rank's memory with torch alone."""

    torch: float
    fsdp: float
    memory_mib: float


def bare_start(num_ranks: int) -> Start:
    """Start a job of as many ranks that trains nothing."""
    found: dict[str, float] = {}

    def read(line: str, seconds: float, pid: int) -> None:
        word, _, number = line.strip().partition(" ")
        found.setdefault(word, float(number) if number and word == "memory" else seconds)

    command = [*torchrun(num_ranks), "-m", "scripts.bench.torchtitan.bare_rank"]
    run_job(command, _ENVIRONMENT, read)
    return Start(found["torch"], found["fsdp"], found["memory"])


class Jobs:
    """All programs' jobs: the peers' environments, the data, and a folder for each program.

    `profiling` is the table of that name, which titan_moe and torchtitan read.
    """

    def __init__(
        self,
        folder: Path,
        venv: Path,
        data: Path,
        tokenizer: Path,
        profiling: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._folder, self._venv, self._data, self._tokenizer = folder, venv, data, tokenizer
        self._profiling = profiling

    def ours(self, model: Model, dtype: str, layout: Layout, steps: int) -> Observed:
        """Train with titan_moe."""
        tables = self.our_tables(model, dtype, layout, steps)
        # As `titan-moe train` starts its ranks.
        variables = allocators(os.environ)
        return self._train("titan_moe", tables, layout, sys.executable, TRAIN, variables)

    def our_tables(
        self, model: Model, dtype: str, layout: Layout, steps: int
    ) -> dict[str, dict[str, Any]]:
        """The configuration of titan_moe's run."""
        tables = self._tables(model, dtype, layout, steps)
        tables["job"] = {"dump_folder": str(self._folder / "titan_moe")}
        tables["model"] = {
            "name": model.family,
            "flavor": model.our_flavor,
            "tokenizer_path": str(self._tokenizer),
        }
        tables["training"] |= {"dataset": "json", "mask_documents": False}
        return tables

    def theirs(self, model: Model, dtype: str, layout: Layout, steps: int) -> Observed:
        """Train with torchtitan."""
        tables = self._tables(model, dtype, layout, steps)
        tables["job"] = {"dump_folder": str(self._folder / "torchtitan")}
        tables["model"] = {
            "name": model.family,
            "flavor": model.their_flavor,
            "hf_assets_path": str(self._tokenizer),
        }
        # The one name under which it reads a local folder of any records with a `text`.
        tables["training"]["dataset"] = "c4_test"
        script = Path(__file__).with_name("torchtitan_rank.py")
        python = str(self._venv / "bin/python")
        return self._train("torchtitan", tables, layout, python, [str(script)])

    def trainer(self, model: Model, dtype: str, steps: int) -> Observed:
        """Train with transformers' Trainer, on one rank."""
        folder = self._folder / "transformers"
        folder.mkdir(parents=True, exist_ok=True)
        config = HFModel(model.family, model_config(model.family, model.our_flavor))
        job = {
            "folder": str(folder),
            "model": str(folder / "config.json"),
            "data": str(self._data),
            "tokenizer": str(self._tokenizer),
            "dtype": dtype,
            "steps": steps,
            "seq_len": SEQ_LEN,
            "batch_size": GLOBAL_BATCH_SIZE,
            "lr": model.lr,
        }
        for name, value in (("config", config.settings()), ("job", job)):
            (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
        script = Path(__file__).with_name("trainer_rank.py")
        python = str(trainer_environment(self._venv) / "bin/python")
        return self._observe("transformers", [python, str(script), str(folder / "job.json")], steps)

    def _tables(
        self, model: Model, dtype: str, layout: Layout, steps: int
    ) -> dict[str, dict[str, Any]]:
        """What both configurations have in common, in the names that they share."""
        return {
            "metrics": {"log_freq": 1, "disable_color_printing": True},
            "profiling": dict(self._profiling),
            "training": {
                "dataset_path": str(self._data),
                "steps": steps,
                "seq_len": SEQ_LEN,
                "local_batch_size": GLOBAL_BATCH_SIZE // layout.num_ranks,
                "global_batch_size": GLOBAL_BATCH_SIZE,
                "max_norm": 1.0,
                "mixed_precision_param": dtype,
            },
            "optimizer": {"name": "AdamW", "lr": model.lr, "beta2": 0.95, "weight_decay": 0.1},
            "lr_scheduler": {"warmup_steps": 2},
            "parallelism": {"expert_parallel_degree": layout.expert_parallel_degree},
            "activation_checkpoint": {"mode": "none"},
        }

    def _train(
        self,
        program: str,
        tables: dict[str, dict[str, Any]],
        layout: Layout,
        python: str,
        command: Sequence[str],
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> Observed:
        folder = self._folder / program
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "job.toml"
        config.write_text(tomli_w.dumps(tables), encoding="utf-8")
        job = [*torchrun(layout.num_ranks, python), *command, "--job.config_file", str(config)]
        return self._observe(program, job, tables["training"]["steps"], variables)

    def _observe(
        self,
        program: str,
        job: Sequence[str],
        steps: int,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> Observed:
        observed = Observed()

        def read(line: str, seconds: float, pid: int) -> None:
            # A job without a launcher is its own rank.
            observed.read(line, seconds, lambda: ranks_memory(pid) or [resident_mib(pid)])

        offline = {"HF_HOME": str(self._folder / program / "hf"), "HF_HUB_OFFLINE": "1"}
        run_job(job, _ENVIRONMENT | offline | dict(variables), read)
        if len(observed.seconds) != steps:
            sys.exit(f"{program}: {len(observed.seconds)} lines of {steps} steps were understood")
        if not all(map(math.isfinite, observed.losses)):
            sys.exit(f"{program}: its loss is not finite")
        return observed


def trainer_environment(venv: Path) -> Path:
    """Where the Trainer's environment is, beside torchtitan's."""
    return venv.with_name(f"{venv.name}-transformers")


def make_environment(venv: Path, *packages: str) -> None:
    """Install a peer and this environment's release of torch into `venv`, unless it is done."""
    mark = venv / "installed"
    wanted = [*packages, f"torch=={metadata.version('torch').partition('+')[0]}"]
    if mark.exists() and mark.read_text(encoding="utf-8").split() == wanted:
        return
    print(f"installing {' '.join(wanted)} into {venv}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    pip = [str(venv / "bin/python"), "-m", "pip", "install", *wanted]
    installed = subprocess.run(pip, capture_output=True, text=True)
    if installed.returncode:
        sys.exit(f"{installed.stdout}{installed.stderr}{' '.join(pip)}: failed")
    mark.write_text("\n".join(wanted), encoding="utf-8")
