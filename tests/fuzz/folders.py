"""Damaged checkpoints, data sets, tokenizers, Hugging Face folders and routing records, each read
by a training run."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.apart import Outcome, run_apart
from tests.fuzz.damage import MARKER, copy_linked, damage
from tests.fuzz.jobs import TINY
from tests.fuzz.verdict import of_failures
from titan_moe.checkpoint.digests import DIGESTS
from titan_moe.train import main

_REPO = Path(__file__).resolve().parents[2]
_STEPS = 4
_TRAINING = TINY | {
    "training.steps": _STEPS,
    "lr_scheduler.total_steps": 10,
    "lr_scheduler.warmup_steps": 1,
    "checkpoint.interval": 2,
}


class Subject(NamedTuple):
    """A kind of folder, and the run that reads one."""

    make: Callable[[Path], None]
    """Writes an undamaged one into a folder."""
    keys: Callable[[Path], dict[str, object]]
    """Keys of the run that reads it; the run's own folder is the one above it."""
    digested: bool
    """Whether its every byte is under a digest: a run that takes it must be the undamaged one's."""


def _train(keys: Mapping[str, object]) -> list[str]:
    return [f"--{key}={value}" for key, value in (_TRAINING | dict(keys)).items()]


def _command(*arguments: str) -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(_REPO)}
    command = [sys.executable, "-m", "titan_moe", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"cannot prepare: {' '.join(command)}\n{done.stderr}")


def _checkpoints(folder: Path) -> None:
    """Of two ranks, so that files can be exchanged between ranks."""
    keys = {"job.dump_folder": folder.parent, "checkpoint.folder": folder.name}
    _command("train", "--ranks", "2", *_train(keys | {"checkpoint.enable": True}))


def _export(folder: Path) -> None:
    made = folder.parents[1] / "made"
    _checkpoints(made / "checkpoint")
    _command("hf", "export", str(made / f"checkpoint/step-{_STEPS}"), "--out", str(folder))


def _foreign(folder: Path) -> None:
    """As from another program: without our digests."""
    _export(folder)
    (folder / DIGESTS).unlink()


def _routing(folder: Path) -> None:
    keys = {"job.dump_folder": folder.parents[1] / "made", "debug.routing_record": folder}
    _command("train", "--ranks", "1", *_train(keys))


def _documents(folder: Path) -> Path:
    """Real text: this machine's Python sources, a record each."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted(Path(json.__file__).parents[1].glob("*.py"))[:120]
    records = [{"text": path.read_text("utf-8", "replace")[:2000]} for path in sources]
    path = folder / "documents.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def _json(folder: Path) -> None:
    _documents(folder)


def _tokens(folder: Path) -> None:
    documents = _documents(folder.parents[1] / "made")
    keys = {"training.dataset": "json", "training.dataset_path": documents}
    chosen = [f"--{key}={value}" for key, value in keys.items()]
    _command("tokenize", "--out", str(folder), *chosen)


def _text(folder: Path) -> None:
    lines = [json.loads(line)["text"] for line in _documents(folder).read_text().splitlines()]
    (folder / "documents.jsonl").unlink()
    (folder / "documents.txt").write_text("\n\n".join(lines))


def _parquet(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    lines = _documents(folder).read_text().splitlines()
    (folder / "documents.jsonl").unlink()
    table = pa.Table.from_pylist([json.loads(line) for line in lines])
    pyarrow.parquet.write_table(table, folder / "documents.parquet", row_group_size=50)


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    folder.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(vocab_size=250, special_tokens=["<eos>"], show_progress=False)
    tokenizer.train_from_iterator(["some words to make a tokenizer of"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


SUBJECTS = {
    "checkpoint": Subject(
        _checkpoints,
        lambda folder: {
            "checkpoint.enable": True,
            "checkpoint.folder": folder.name,
            "training.steps": _STEPS + 1,
        },
        digested=True,
    ),
    "export": Subject(
        _export,
        lambda folder: {
            "checkpoint.enable": True,
            "checkpoint.initial_load_path": folder,
            "checkpoint.initial_load_in_hf": True,
            "training.steps": 1,
        },
        digested=True,
    ),
    "Hugging Face folder": Subject(
        _foreign,
        lambda folder: {
            "checkpoint.enable": True,
            "checkpoint.initial_load_path": folder,
            "checkpoint.initial_load_in_hf": True,
            "training.steps": 1,
        },
        digested=False,
    ),
    "routing": Subject(_routing, lambda folder: {"debug.routing_replay": folder}, digested=False),
    "tokens": Subject(
        _tokens,
        lambda folder: {"training.dataset": "tokens", "training.dataset_path": folder},
        digested=False,
    ),
    "json": Subject(
        _json,
        lambda folder: {
            "training.dataset": "json",
            "training.dataset_path": folder / "documents.jsonl",
        },
        digested=False,
    ),
    "text": Subject(
        _text,
        lambda folder: {
            "training.dataset": "text",
            "training.dataset_path": folder / "documents.txt",
        },
        digested=False,
    ),
    "tokenizer": Subject(
        _tokenizer, lambda folder: {"model.tokenizer_path": folder}, digested=False
    ),
    "parquet": Subject(
        _parquet,
        lambda folder: {
            "training.dataset": "parquet",
            "training.dataset_path": folder / "documents.parquet",
        },
        digested=False,
    ),
}


class Folders:
    """Undamaged folders, made once, and what the run that reads each of them measures."""

    def __init__(self, work: Path, seconds: float) -> None:
        """`work`: a folder to make them in; `seconds`: of a trial."""
        self._work = work
        self._seconds = seconds
        self._figures: dict[str, str] = {}

    def trial(self, name: str, random_: random.Random) -> tuple[str, Outcome]:
        """One damage and how it ended. Raises SystemExit where the run refuses the undamaged
        folder, or takes an empty one: such trials would show nothing."""
        if name not in self._figures:
            whole, empty = (self._run(name, each)[1] for each in (_nothing, _empty))
            if (whole.kind, empty.kind) != ("read", "refused"):
                sys.exit(f"{name}: undamaged {whole.said}; emptied {empty.said}")
            self._figures[name] = whole.said
        done, outcome = self._run(name, lambda folder: damage(folder, random_))
        same = outcome.kind != "read" or outcome.said == self._figures[name]
        if SUBJECTS[name].digested and not same:
            return done, Outcome("failed", f"went on as another run: {outcome.said}")
        return done, outcome

    def _run(self, name: str, change: Callable[[Path], str]) -> tuple[str, Outcome]:
        subject = SUBJECTS[name]
        whole = self._work / name / "run" / "data"
        if not whole.exists():
            whole.parent.mkdir(parents=True, exist_ok=True)
            subject.make(whole)
        case = self._work / name / "case"
        subprocess.run(["rm", "-rf", str(case)], check=True)
        copy_linked(whole.parent, case)
        folder = case / whole.name
        done = change(folder)
        before = _listing(folder)
        keys = {"job.dump_folder": case} | subject.keys(folder)
        outcome = run_apart(lambda own: _train_here(keys, own), seconds=self._seconds)
        if (case / MARKER).exists():
            return done, Outcome("failed", "a program in the data was run")
        if outcome.kind == "refused" and _listing(folder) != before:
            return done, Outcome("failed", f"changed the folder: {outcome.said}")
        return done, outcome


def _nothing(folder: Path) -> str:
    return "nothing"


def _empty(folder: Path) -> str:
    for path in folder.rglob("*"):
        if path.is_file():
            path.unlink()
    return "emptied"


def _train_here(keys: dict[str, object], own: Path) -> Outcome:
    arguments = _train(keys)
    code = main(arguments, {"TITAN_MOE_FAILURES": str(own), "CUDA_VISIBLE_DEVICES": ""})
    if code:
        return of_failures(own, code)
    lines = (Path(str(keys["job.dump_folder"])) / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    return Outcome("read", json.dumps({key: last[key] for key in ("step", "loss", "grad_norm")}))


def _listing(folder: Path) -> list[tuple[str, int, int]]:
    found = [(path, path.lstat()) for path in sorted(folder.rglob("*"))]
    return [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in found]
