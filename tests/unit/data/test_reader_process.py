"""A reader in a child process reads the same as one in this process, and never outlives it."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from tests.support.documents import build_loader, random_texts, take, training, write_jsonl
from tests.support.jobs import is_running, until
from tests.support.processes import start_process
from tests.support.refusals import refusal
from titan_moe.config.job_config import JobConfig
from titan_moe.config.training_stages import job_of_step
from titan_moe.data.build import build_reader, measure_conversations
from titan_moe.data.loader import Loader, ReaderProcess, documents_without_text
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.models.hf import model_of_job
from titan_moe.parallelize.policies import make_plan
from titan_moe.runtime.errors import RunError
from titan_moe.training.train_data import TrainData

PLACE = {"seed": 3, "rank": 1, "num_ranks": 2}


def in_a_process(section, *, size=8, **place):
    section = section.model_copy(update={"global_batch_size": size})
    reader = ReaderProcess(build_reader, section, "bytes", **(PLACE | place))
    return Loader(reader, prefetch_factor=2)


def test_reader_process_gives_the_batches_of_a_reader_in_this_process(tmp_path):
    write_jsonl(tmp_path / "a.json", random_texts(80))
    write_jsonl(tmp_path / "b.json", random_texts(90, seed=1))
    section = training(dataset="c4", dataset_path=str(tmp_path), repeat_dataset=True)
    far, near = in_a_process(section), build_loader(section, **PLACE)
    assert far.identity == near.identity and far.state_dict() == near.state_dict()
    for _ in range(6):
        assert take([far], 1) == take([near], 1)
        assert far.state_dict() == near.state_dict()
    state = json.loads(json.dumps(near.state_dict()))
    expected = take([near], 3)
    for _ in range(2):
        far.load_state_dict(state)
        assert far.state_dict() == state
        assert take([far], 3) == expected
    for loader in (far, near):
        loader.close()


def test_mistakes_in_the_reader_process_are_one_line(tmp_path):
    path = write_jsonl(tmp_path / "a.json", ["x" * 500] * 9)
    section = training(dataset="json", dataset_path=path)
    line = refusal(lambda: in_a_process(section, size=64))
    assert line.startswith("training.dataset='json' has 9 documents to train on, fewer")
    loader = in_a_process(section)
    other = loader.state_dict() | {"identity": {**loader.state_dict()["identity"], "seed": 9}}
    with pytest.raises(RunError, match="was taken with seed=9, this run has seed=3"):
        loader.load_state_dict(other)
    for _ in range(2):
        with pytest.raises(RunError, match=r"^step \d+: training.dataset='json' ran out: sequ"):
            while True:
                loader.next_step()
    loader.close()


def test_reader_process_reads_epochs_of_conversations(tmp_path):
    lines = [json.dumps({"prompt": "ab", "completion": "c" * (1 + n % 9)}) for n in range(90)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    keys = {"dataset": "json", "dataset_path": str(tmp_path), "dataset_format": "messages"}
    section = training(epochs=2, seq_len=32, **keys)
    tokenizer = load_tokenizer("bytes", section)
    (lengths,) = measure_conversations(section, tokenizer, seed=3, part=0, parts=1)
    far = in_a_process(section, lengths=[lengths.tokens])
    near = build_loader(section, tokenizer, **PLACE)
    steps = far.count_steps()
    assert steps == near.count_steps() > 3
    assert take([far], steps) == take([near], steps)
    with pytest.raises(RunError, match="ran out: its 90 conversations"):
        far.next_step()
    far.close()
    near.close()


def test_death_of_the_reader_process_is_one_line():
    reader = ReaderProcess(build_reader, training(global_batch_size=8), "bytes", **PLACE)
    loader = Loader(reader, prefetch_factor=2)
    loader.next_step()
    os.kill(reader._child.pid, signal.SIGKILL)
    with pytest.raises(RunError) as caught:
        while True:
            loader.next_step()
    assert str(caught.value) == (
        "the process that reads the data was killed by SIGKILL (often: out of memory): start again "
        "from the latest checkpoint"
    )
    loader.close()


def test_close_ends_the_reader_process_at_once(tmp_path):
    """The process ends even while it reads from a pipe that nobody writes to."""
    path = tmp_path / "a.json"
    write_jsonl(path, ["x"])
    section = training(dataset="c4", dataset_path=str(tmp_path), global_batch_size=8)
    reader = ReaderProcess(build_reader, section, "bytes", **PLACE)
    path.unlink()
    os.mkfifo(path)  # Nothing writes to it.
    loader = Loader(reader, prefetch_factor=2)
    loader._read_ahead()
    time.sleep(0.5)
    loader.close()
    assert reader._child.exitcode == -signal.SIGKILL


_RANK = """
import sys, time
from titan_moe.config.job_config import JobConfig, Training
from titan_moe.data.build import build_reader
from titan_moe.data.loader import ReaderProcess
section = Training(dataset="synthetic", seq_len=64, local_batch_size=2, global_batch_size=4)
reader = ReaderProcess(build_reader, section, "bytes", seed=0)
reader.read_step()
print(reader._child.pid, "torch" in sys.modules, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_reader_process_ends_with_its_rank(number):
    rank = start_process([sys.executable, "-c", _RANK], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    pid, torch_there = rank.stdout.readline().split()
    assert torch_there == "False"
    # Signals that a terminal or a job sends to all of its processes are the rank's to answer.
    for harmless in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(int(pid), harmless)
    time.sleep(0.2)
    assert is_running(pid)
    rank.send_signal(number)
    rank.wait()
    assert until(lambda: not is_running(pid), 20)


def job_of(section, stages=()):
    model = {"name": "deepseek_v3", "flavor": "2M", "tokenizer_path": "bytes"}
    return JobConfig(model=model, training=section, stages=list(stages))


def data_of(job, step=1, device="cpu"):
    process = SimpleNamespace(device=torch.device(device), rank=0, world_size=1, is_main=True)
    return TrainData(job, make_plan(job_of_step(job, step), model_of_job(job.model), 1), process)


@pytest.mark.parametrize("device", ["cpu", "cuda:5"])
def test_run_reads_in_another_process_beside_a_gpu_alone(device, monkeypatch):
    pinned_for = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: pinned_for.append(str(device)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    job = job_of(training(global_batch_size=8))
    data = data_of(job, device=device)
    assert isinstance(data.loader.reader, ReaderProcess) == device.startswith("cuda")
    expected = build_loader(job.training, seed=job.debug.seed)
    state = expected.state_dict()
    assert take([data.loader], 1) == take([expected], 1)
    assert pinned_for == [device] * device.startswith("cuda")
    data.load_state(state)
    assert len(data.loader.next_step()) == 4
    data.loader.close()
    expected.close()


def test_run_warns_of_few_held_out_documents(tmp_path, caplog):
    path = write_jsonl(tmp_path / "a.jsonl", random_texts(511))
    job = job_of(training(dataset="json", dataset_path=path, global_batch_size=8))
    data_of(job.with_values(validation={"enable": True})).loader.close()
    assert "validation.held_out_every=64 holds out 7 of 511 documents" in caplog.text


def test_documents_without_a_text_are_counted_across_a_resume_in_another_stage(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [None, "a", "b", "c"])
    keys = {"dataset": "json", "dataset_path": path, "repeat_dataset": True, "seq_len": 4}
    later_stage = {"from_step": 3, "global_batch_size": 4, "local_batch_size": 4}
    job = job_of(training(global_batch_size=2, **keys), [later_stage])
    data, later = data_of(job), data_of(job, step=3)
    for _ in range(2):
        data.loader.next_step()
    counted = documents_without_text(data.loader.state_dict())
    later.load_state(data.loader.state_dict())
    assert documents_without_text(later.loader.state_dict()) == counted > 0
    later.loader.next_step()
    assert documents_without_text(later.loader.state_dict()) > counted
    data.loader.close()
    later.loader.close()
