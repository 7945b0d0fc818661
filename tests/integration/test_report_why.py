"""report why, as a user starts it: on a run of two ranks that reads one bad document."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.support.commands import run_command
from tests.support.trainings import make_job, train_here
from titan_moe.config.job_config import JobConfig
from titan_moe.data.build import build_loader
from titan_moe.data.builtin import SyntheticCorpus
from titan_moe.data.tokenizer import ByteTokenizer
from titan_moe.runtime.ranks import run_on_ranks

STEP, STEPS = 11, 12


class Trained(NamedTuple):
    folder: Path
    corpus: Path
    bad: str


def _write(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def _whole_document(job: JobConfig) -> str:
    """A document that lies within a sequence of the step."""
    place = {"seed": 0, "rank": 0, "num_ranks": 1, "global_batch_size": 4}
    loader = build_loader(job.training, ByteTokenizer(), validation=job.validation, **place)
    for _ in range(STEP):
        (*_, batch) = loader.next_step()
    loader.close()
    return batch.samples[0][1]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Twelve steps with checkpoints after the fourth and the eighth; garbage in the eleventh."""
    folder = tmp_path_factory.mktemp("run")
    corpus, dump = folder / "corpus.jsonl", folder / "run"
    words = SyntheticCorpus(0)
    texts = [str(words[number].content)[:80].ljust(80, ".") for number in range(300)]
    _write(corpus, texts)
    data = {"dataset": "json", "dataset_path": str(corpus), "mask_documents": True}
    job = make_job(
        dump,
        steps=STEPS,
        training={"seq_len": 128, "global_batch_size": 4, **data},
        optimizer={"lr": 3e-3},
        checkpoint={"interval": 4},
        parallelism={"expert_parallel_degree": 2},
        validation={"enable": True, "freq": 100, "steps": 1},
    )
    bad = _whole_document(job)
    number = int("".join(filter(str.isdecimal, bad.rpartition("/")[2] or bad)))
    texts[number] = "~\x01" * 40
    _write(corpus, texts)
    run_on_ranks(train_here, 2, job)
    return Trained(dump, corpus, bad)


def test_a_bad_document_is_named_first(run: Trained, tmp_path: Path):
    done = run_command("report", "why", run.folder, STEP, "--out", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["start"].endswith("step-8") and found["compared_with"].endswith("steps 9 to 10")
    # Two ranks' step, made again by one process.
    assert found["notes"] == []
    assert found["now"]["loss"] == pytest.approx(found["logged"]["loss"], rel=1e-4)
    assert found["now"]["norm"] == pytest.approx(found["logged"]["norm"], rel=1e-3)
    assert found["documents"][0]["name"] == run.bad and found["needed"] == 1
    assert run.bad in found["rows"][0]["name"] and found["tokens"][0]["name"] == run.bad
    assert found["following"]["loss"] < found["limit"]["loss"] < found["now"]["loss"]
    assert sum(part["share"] for part in found["rows"]) == pytest.approx(1, abs=1e-3)
    assert len(found["experts"]) == 20
    page = (tmp_path / f"why-{STEP}.html").read_text()
    assert run.bad in page and "http" not in page.replace("http://www.w3.org", "")
    assert json.loads((tmp_path / f"why-{STEP}.json").read_text()) == found


@contextmanager
def _changed(path: Path, old: str, new: str) -> Iterator[None]:
    text = path.read_text()
    path.write_text(text.replace(old, new, 1))
    yield
    path.write_text(text)


def _no_memory(*_: object) -> None:
    raise torch.OutOfMemoryError


def _refused(*words: object, code: int = 2) -> str:
    done = run_command("report", "why", *words)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and done.returncode == code, done
    return line


def test_what_cannot_be_made_again_is_one_line(
    run: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert "no such folder" in _refused(tmp_path / "nowhere", 3)
    assert "holds no run" in _refused(tmp_path, 3)
    assert "is beyond the run" in _refused(run.folder, STEPS + 1)
    assert "--max-repeated 2 makes" in _refused(run.folder, STEP, "--max-repeated", 1)
    assert "must be a positive number" in _refused(run.folder, 0)
    with _changed(run.corpus, "a", "b"):
        line = _refused(run.folder, STEP, code=1)
    assert "the data is not what the run read: its checksum was" in line
    moved = run.corpus.rename(run.corpus.with_suffix(".moved"))
    try:
        assert "does not exist" in _refused(run.folder, STEP)
    finally:
        moved.rename(run.corpus)
    manifest = run.folder / "checkpoint/step-8/manifest.json"
    with _changed(manifest, '"step": 8', '"step": 9'):
        assert "manifest.json" in _refused(run.folder, STEP, code=1)
    monkeypatch.setattr("titan_moe.debug.why.repetition._free_memory", lambda: 2**20)
    assert "the whole model on one process needs" in _refused(run.folder, STEP, code=1)
    monkeypatch.setattr("titan_moe.debug.why.explain.Repetition", _no_memory)
    assert "do not fit into the GPU's memory" in _refused(run.folder, STEP, code=1)


@pytest.mark.slow
def test_what_the_run_left_out_is_left_out(run: Trained, tmp_path: Path):
    """As if it had gone back from step 9 and left its batch out: step 10 has that of 11."""
    events = run.folder / "events.jsonl"
    decided = ('"roll_back", "checkpoint": 8', '"skip"')
    events.write_text("".join(f'{{"step": 9, "decision": {each}}}\n' for each in decided))
    done = run_command("report", "why", run.folder, STEP - 1, "--out", tmp_path, "--json")
    events.unlink()
    found = json.loads(done.stdout)
    assert "step 9: left out, as by the run" in done.stderr
    assert found["documents"][0]["name"] == run.bad
    assert found["start"].endswith(
        "without the batches that the run left out when it went back (1)"
    )
    assert any("the run read other sequences" in note for note in found["notes"])


@pytest.mark.slow
def test_a_stage_between_the_checkpoint_and_the_step_is_made_again(tmp_path: Path):
    """From the beginning, as no checkpoint is early enough."""
    stage = {"from_step": 3, "seq_len": 32, "parallelism": {"tensor_parallel_degree": 2}}
    job = make_job(tmp_path, steps=4)
    tables = job.model_dump()
    tables["stages"] = [stage]
    run_on_ranks(train_here, 2, JobConfig.model_validate(tables))
    done = run_command("report", "why", tmp_path, 4, "--json")
    found = json.loads(done.stdout)
    assert found["notes"] == [] and "beginning" in found["start"], done.stderr
    assert found["now"]["loss"] == pytest.approx(found["logged"]["loss"], rel=1e-4)
