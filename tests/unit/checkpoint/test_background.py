"""One process: saves in the background are those of a step that waits, and fail in one line."""

import io
import os
import resource
import signal
import time
from itertools import count
from pathlib import Path
from threading import Timer
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.serialization import config

from tests.support.checkpointers import plain_checkpointer
from tests.support.saved_runs import WriterHere
from titan_moe.checkpoint import background, storage
from titan_moe.checkpoint.audit import audit
from titan_moe.checkpoint.checkpointer import Checkpointer
from titan_moe.checkpoint.digests import read_digests
from titan_moe.checkpoint.shared_memory import SharedMemory
from titan_moe.checkpoint.tensor_files import Chunk, frame_of
from titan_moe.runtime.errors import RunError


class _Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 4)
        self.w_EFD = nn.Parameter(torch.randn(2, 3, 5))
        self.register_buffer("load_E", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("wide", torch.randn(3, 2, dtype=torch.float64).t())


class _Run:
    def __init__(self, folder, *, seed=0, **options):
        torch.manual_seed(seed)
        self.model = _Toy()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        keys = {"interval": 1, "async_mode": "async", **options}
        self.checkpointer = plain_checkpointer(folder, self.model, self.optimizer, **keys)

    def step(self, step):
        """A step of training and its checkpoint."""
        self.optimizer.step()
        return self.checkpointer.maybe_save(step, {"step": step, "tokens": 0, "data": {"0": step}})

    @property
    def writer(self):
        return self.checkpointer._background._child.pid


def _names(folder):
    return sorted(path.name for path in (folder / "checkpoint").iterdir())


@pytest.fixture
def run(tmp_path):
    run = _Run(tmp_path)
    yield run
    if run.checkpointer._background is not None:
        run.checkpointer._background.close()


def test_files_are_those_of_a_step_that_waits(tmp_path, run):
    assert run.step(1) and run.step(2)
    run.checkpointer.finish()
    waiting = _Run(tmp_path / "waiting", async_mode="disabled")
    assert waiting.step(1) and waiting.step(2)
    for step in (1, 2):
        ours, theirs = (
            read_digests(folder / f"checkpoint/step-{step}")
            for folder in (tmp_path, tmp_path / "waiting")
        )
        assert ours == theirs and "__0_0.distcp" in ours and "manifest.json" in ours
        assert audit(tmp_path / f"checkpoint/step-{step}").problems == []
    assert run.checkpointer.last_step == 2


def test_what_is_written_is_the_state_of_the_step(tmp_path, run):
    run.step(1)
    expected = run.model.linear.weight.detach().clone()
    os.kill(run.writer, signal.SIGSTOP)
    run.optimizer.step()  # While it has written nothing.
    os.kill(run.writer, signal.SIGCONT)
    run.checkpointer.finish()
    other = _Run(tmp_path, seed=1)
    assert other.checkpointer.load() == {"step": 1, "tokens": 0, "data": {"0": 1}}
    assert torch.equal(other.model.linear.weight, expected)
    assert not torch.equal(run.model.linear.weight, expected)


def test_a_save_waits_for_the_one_before_it_and_buffers_are_kept(tmp_path, run, caplog):
    caplog.set_level("INFO")
    run.step(1)
    pid, memory = run.writer, run.checkpointer._background._memory
    for step in range(2, 5):
        run.step(step)
    assert "step 2 waited" in caplog.text and "for the save before it" in caplog.text
    assert (run.writer, run.checkpointer._background._memory) == (pid, memory)
    run.checkpointer.finish()
    assert "step-4 in the background in" in caplog.text
    assert _names(tmp_path) == ["step-1", "step-2", "step-3", "step-4"]
    run.checkpointer.finish()


def test_a_step_without_a_save_ends_one(tmp_path):
    run = _Run(tmp_path, interval=2)
    run.step(1)
    run.step(2)
    deadline = time.monotonic() + 30
    step = 2
    while not (tmp_path / "checkpoint/step-2").exists() and time.monotonic() < deadline:
        step += 2
        run.checkpointer.maybe_save(step - 1, {})
        time.sleep(0.02)
    assert _names(tmp_path) == ["step-2"]
    run.checkpointer.finish()
    assert run.checkpointer.last_step == 2 and _names(tmp_path) == ["step-2"]


def test_the_last_one_is_complete_and_as_configured(tmp_path):
    run = _Run(tmp_path, last_save_model_only=True)
    run.step(1)
    assert run.checkpointer.maybe_save(2, {"step": 2, "data": {}}, last=True)
    assert _names(tmp_path) == ["step-1", "step-2"]
    assert run.checkpointer.last_step == 2 and run.checkpointer._background is None
    assert not (tmp_path / "checkpoint/step-2/train_state.json").exists()
    assert (tmp_path / "checkpoint/step-1/train_state.json").exists()


def test_the_last_complete_one_stays_until_the_next_is(tmp_path):
    run = _Run(tmp_path, keep_latest_k=1)
    run.step(1)
    run.checkpointer._background.wait()
    os.kill(run.writer, signal.SIGSTOP)
    run.step(2)
    time.sleep(0.1)
    assert "step-1" in _names(tmp_path)
    os.kill(run.writer, signal.SIGCONT)
    run.checkpointer.finish()
    assert _names(tmp_path) == ["step-2"]


def test_the_time_of_a_save_is_that_until_it_is_complete(tmp_path):
    run = _Run(tmp_path, interval=2)
    run.step(1)
    checkpointer = run.checkpointer
    assert (checkpointer.pending(1), checkpointer.pending(2)) == (False, True)
    os.kill(run.writer, signal.SIGSTOP)
    run.step(2)
    time.sleep(0.5)
    checkpointer.maybe_save(3, {})
    assert checkpointer.pending(3) and checkpointer.longest_save >= 0.5, "while it is under way"
    time.sleep(0.2)
    os.kill(run.writer, signal.SIGCONT)
    checkpointer.finish()
    assert not checkpointer.pending(3) and checkpointer.longest_save >= 0.7
    checkpointer.longest_save = 0.0
    checkpointer.save(5, {"step": 5, "data": {}})
    assert checkpointer.longest_save > 0


def _first_step(run):
    """With its save, of which the checkpointer has heard."""
    run.step(1)
    background = run.checkpointer._background
    run.checkpointer._note(background, background.wait())


def _fails(run, folder, words):
    """The next steps say so in one line, and the checkpoint before is the latest."""
    with pytest.raises(RunError) as caught:
        for _ in range(2000):
            run.checkpointer.maybe_save(3, {})
            time.sleep(0.01)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"cannot save checkpoint {folder}/checkpoint/step-2: ")
    assert _names(folder) == ["step-1"]
    assert run.checkpointer.finish() == 1


def test_a_killed_writer_is_one_line(tmp_path):
    run = _Run(tmp_path, interval=2, enable_first_step_checkpoint=True)
    _first_step(run)
    os.kill(run.writer, signal.SIGSTOP)
    run.step(2)
    os.kill(run.writer, signal.SIGKILL)
    _fails(run, tmp_path, "the process that writes it was killed by SIGKILL")


def test_a_full_disk_is_one_line(tmp_path):
    run = _Run(tmp_path, interval=2, enable_first_step_checkpoint=True)
    _first_step(run)
    resource.prlimit(run.writer, resource.RLIMIT_FSIZE, (1000, 1000))
    run.step(2)
    _fails(run, tmp_path, "File too large")


def test_a_writer_that_stands_still_is_ended_before_its_files_go(tmp_path, monkeypatch):
    run = _Run(tmp_path, save_timeout_seconds=120)
    _first_step(run)
    writer = run.writer
    os.kill(writer, signal.SIGSTOP)
    run.step(2)
    remove = storage.abandon

    def remove_of_dead(aside):
        with pytest.raises(ProcessLookupError):
            os.kill(writer, 0)
        remove(aside)

    monkeypatch.setattr(storage, "abandon", remove_of_dead)
    clock = SimpleNamespace(monotonic=count(step=50).__next__, perf_counter=time.perf_counter)
    monkeypatch.setattr(background, "time", clock)
    late = r"step-2: it is not on disk after checkpoint\.save_timeout_seconds=120: raise it if the"
    with pytest.raises(RunError, match=late):
        run.checkpointer.finish()
    assert clock.monotonic() < 400
    assert _names(tmp_path) == ["step-1"]


def test_a_slow_save_is_awaited_to_its_limit(tmp_path):
    run = _Run(tmp_path, save_timeout_seconds=60)
    _first_step(run)
    os.kill(run.writer, signal.SIGSTOP)
    run.step(2)
    Timer(1.5, os.kill, (run.writer, signal.SIGCONT)).start()
    assert run.checkpointer.finish() == 2


def test_copies_that_differ_are_not_committed(tmp_path, monkeypatch):
    names = [["model.linear.weight", "model.linear.bias"]]
    monkeypatch.setattr(Checkpointer, "_copies", lambda self: names)
    run = _Run(tmp_path)
    run.step(1)
    with pytest.raises(
        RunError, match=r"^linear\.weight and its copies linear\.bias are not the same"
    ):
        run.checkpointer.finish()
    assert _names(tmp_path) == []


@pytest.mark.parametrize("name", ["rank-0.json", "__0_0.distcp"])
def test_a_folder_that_nodes_do_not_share_is_one_line(tmp_path, monkeypatch, name):
    class Elsewhere(WriterHere):
        def finish(self, request):
            (request.aside / name).unlink()
            super().finish(request)

    monkeypatch.setattr(background.BackgroundSaves, "writer_process", Elsewhere)
    run = _Run(tmp_path)
    run.step(1)
    with pytest.raises(RunError, match=f"{name} is missing: it was removed, or job.dump"):
        run.checkpointer.finish()
    assert _names(tmp_path) == []


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4, 5), (70_000,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64], ids=str)
def test_frames_are_torchs(shape, dtype):
    values = torch.randint(0, 2, shape).to(dtype)
    stream = io.BytesIO()
    with config.patch("save.compute_crc32", False):
        torch.save(values, stream)
    before, after = frame_of(Chunk("x", tuple(slice(0, size) for size in shape), shape, dtype))
    assert before + values.reshape(-1).view(torch.uint8).numpy().tobytes() + after == (
        stream.getvalue()
    )


def test_the_first_copy_finds_its_pages_mapped():
    number = 4096
    memory = SharedMemory(number * resource.getpagesize() + 5, pinned=False)
    memory._mapper.join(30)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    memory.view(0, (number * resource.getpagesize(),), torch.uint8).fill_(1)
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    memory.close()
    if tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14):
        pytest.skip("this Linux maps pages only as they are touched")
    assert faults < number // 10


def test_the_writer_needs_no_torch(run):
    run.step(1)
    run.checkpointer._background.wait()
    maps = Path(f"/proc/{run.writer}/maps").read_text()
    assert "numpy" in maps and "libtorch" not in maps
