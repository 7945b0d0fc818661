"""The jobs that compare.py starts, and what it measures of them from outside.

A step ends when its line is on the program's standard output, and memory is what the kernel reports
of its ranks at that moment.
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
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from scripts.bench.measure import TRAIN, run_job, torchrun
from scripts.bench.processes import ranks_memory
from titan_moe.models.config import ModelConfig
from titan_moe.models.registry import model_config

TORCHTITAN = "torchtitan==0.2.2"
PROGRAMS = ("titan_moe", "torchtitan")
SEQ_LEN, GLOBAL_BATCH_SIZE = 256, 8
VOCAB_SIZE, EOS = 2048, "<|end|>"
LEFT_OUT = 5
"""Steps at the beginning that do not count."""
BYTES = {"float32": 4, "bfloat16": 2}
_RECORD_CHARACTERS, _NUM_RECORDS = 4000, 1000
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
_STEP = re.compile(r"\bstep:?\s+(\d+)(?:/\d+)?\s+loss:?\s+(\S+)")
_PARAMETERS = re.compile(r"size: ([\d,]+) total parameters")


class Layout(NamedTuple):
    """Number of a job's ranks, and of those that share the experts."""

    name: str
    num_ranks: int
    expert_parallel_degree: int


class Model(NamedTuple):
    """One network as both programs name it."""

    name: str
    family: str
    our_flavor: str
    their_flavor: str
    num_parameters: int
    lr: float

    @property
    def config(self) -> ModelConfig:
        return model_config(self.family, self.our_flavor)


_MODELS = (
    Model("cmp", "qwen3", "debugmodel_moe", "peer", 14_428_672, 3e-4),
    Model("ds", "deepseek_v3", "debugmodel", "debugmodel", 33_014_016, 8e-4),
)
_LAYOUTS = (Layout("1 rank", 1, 1), Layout("FSDP 2", 2, 1), Layout("FSDP 2, EP 2", 2, 2))


@dataclass
class Observed:
    """One run as measured from outside; lists have one value per step."""

    seconds: list[float] = field(default_factory=list)
    """Seconds from the launch to each step's end."""
    losses: list[float] = field(default_factory=list)
    resident_mib: list[float] = field(default_factory=list)
    """Memory of the largest rank at each step."""
    peak_mib: float = 0.0
    """Peak memory of the largest rank, up to the last step."""
    num_parameters: int | None = None
    """Number of parameters that the program prints."""

    def read(self, line: str, seconds: float, memory: Callable[[], list[dict[str, float]]]) -> None:
        """Takes one line of output; of ranks that all print a step, the first counts."""
        if match := _PARAMETERS.search(line):
            self.num_parameters = int(match[1].replace(",", ""))
        match = _STEP.search(line)
        if match is None or int(match[1]) != len(self.seconds) + 1:
            return
        self.seconds.append(seconds)
        self.losses.append(float(match[2]))
        ranks = memory()
        before = self.resident_mib[-1] if self.resident_mib else 0.0
        self.resident_mib.append(max((rank["VmRSS"] for rank in ranks), default=before))
        self.peak_mib = max([self.peak_mib, *(rank["VmHWM"] for rank in ranks)])

    def tokens_per_second(self) -> list[float]:
        """Returns tokens/s of every step that counts."""
        ends = self.seconds[LEFT_OUT - 1 :]
        tokens = GLOBAL_BATCH_SIZE * SEQ_LEN
        return [tokens / (end - begin) for begin, end in pairwise(ends)]


@dataclass
class Row:
    """One model, type and layout, and each program's runs: one per round."""

    model: Model
    dtype: str
    layout: Layout
    runs: dict[str, list[Observed]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Text that --rows is matched against."""
        return f"{self.model.name} {self.dtype} {self.layout.name}"


def all_rows() -> list[Row]:
    return [
        Row(model, dtype, layout) for model in _MODELS for layout in _LAYOUTS for dtype in BYTES
    ]


class Jobs:
    """All programs' jobs in one folder, with their data, tokenizer and configurations."""

    def __init__(self, folder: Path, venv: Path) -> None:
        self._folder = folder
        self._venv = venv
        self._data, self._tokenizer = folder / "text/data", folder / "text/tokenizer"

    def prepare(self) -> None:
        """Makes what is not there yet: torchtitan's environment, the data and the tokenizer."""
        make_environment(self._venv)
        write_data(self._data, self._tokenizer)

    def run(self, program: str, row: Row, steps: int) -> Observed:
        """Trains with one program. Raises JobFailed."""
        folder = self._folder / program
        folder.mkdir(parents=True, exist_ok=True)
        variables = {**_ENVIRONMENT, "HF_HOME": str(folder / "hf")}
        config = folder / "job.toml"
        config.write_text(tomli_w.dumps(self.tables(program, row, steps)), encoding="utf-8")
        if program == "titan_moe":
            # run_train.sh starts its ranks with these allocators.
            script = Path(__file__).parents[2] / "environment.sh"
            command = ["bash", "-c", f'source {script}; use_allocators; exec "$@"', "bash"]
            command += [*torchrun(row.layout.num_ranks), *TRAIN]
        else:
            command = torchrun(row.layout.num_ranks, str(self._venv / "bin/python"))
            command += [str(Path(__file__).with_name("torchtitan_rank.py"))]
        return observe(program, [*command, "--job.config_file", str(config)], steps, variables)

    def tables(self, program: str, row: Row, steps: int) -> dict[str, dict[str, Any]]:
        """Returns the TOML file of titan_moe's or torchtitan's run."""
        tables: dict[str, dict[str, Any]] = {
            "job": {"dump_folder": str(self._folder / program)},
            "metrics": {"log_freq": 1, "disable_color_printing": True},
            "training": {
                "dataset_path": str(self._data),
                "steps": steps,
                "seq_len": SEQ_LEN,
                "local_batch_size": GLOBAL_BATCH_SIZE // row.layout.num_ranks,
                "global_batch_size": GLOBAL_BATCH_SIZE,
                "max_norm": 1.0,
                "mixed_precision_param": row.dtype,
            },
            "optimizer": {"name": "AdamW", "lr": row.model.lr, "beta2": 0.95, "weight_decay": 0.1},
            "lr_scheduler": {"warmup_steps": 2},
            "parallelism": {"expert_parallel_degree": row.layout.expert_parallel_degree},
            "activation_checkpoint": {"mode": "none"},
        }
        model = {"name": row.model.family}
        if program == "titan_moe":
            model |= {"flavor": row.model.our_flavor, "tokenizer_path": str(self._tokenizer)}
            tables["training"] |= {"dataset": "json", "mask_documents": False}
        else:
            model |= {"flavor": row.model.their_flavor, "hf_assets_path": str(self._tokenizer)}
            # torchtitan's only name for a local folder of records with a `text`.
            tables["training"]["dataset"] = "c4_test"
        return {**tables, "model": model}


def observe(
    program: str, command: Sequence[str], steps: int, variables: Mapping[str, str]
) -> Observed:
    """Runs a job and measures it from outside."""
    observed = Observed()

    def read(line: str, seconds: float, pid: int) -> None:
        observed.read(line, seconds, lambda: ranks_memory(pid))

    run_job(command, variables, read)
    if len(observed.seconds) != steps:
        sys.exit(f"{program}: {len(observed.seconds)} lines of {steps} steps were understood")
    if not all(map(math.isfinite, observed.losses)):
        sys.exit(f"{program}: its loss is not finite")
    return observed


def make_environment(venv: Path) -> None:
    """Installs torchtitan and this environment's release of torch in `venv`, unless it is done."""
    mark = venv / "installed"
    wanted = [TORCHTITAN, f"torch=={metadata.version('torch').partition('+')[0]}"]
    if mark.exists() and mark.read_text(encoding="utf-8").split() == wanted:
        return
    print(f"installing {' '.join(wanted)} into {venv}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    pip = [str(venv / "bin/python"), "-m", "pip", "install", *wanted]
    installed = subprocess.run(pip, capture_output=True, text=True)
    if installed.returncode:
        sys.exit(f"{installed.stdout}{installed.stderr}{' '.join(pip)}: failed")
    mark.write_text("\n".join(wanted), encoding="utf-8")


def write_data(data: Path, tokenizer: Path) -> None:
    """Writes records of the standard library's sources and a BPE tokenizer trained on them.

    Both are functions of the interpreter's version.
    """
    if (tokenizer / "tokenizer_config.json").exists():
        return
    # More threads might merge equally frequent pairs in another order.
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    size = min(_RECORD_CHARACTERS, len(text) // _NUM_RECORDS)
    texts = [text[start : start + size] for start in range(0, size * _NUM_RECORDS, size)]
    for folder in (data, tokenizer):
        folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"text": each}) + "\n" for each in texts)
    (data / "records.jsonl").write_text("".join(lines), encoding="utf-8")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    assert bpe.get_vocab_size() == VOCAB_SIZE
    bpe.save(str(tokenizer / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
