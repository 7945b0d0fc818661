"""Files that change in place, behind the same names and sizes, are noticed when a run resumes."""

import json
import random

import numpy as np
import pytest

from tests.support.documents import ListCorpus, random_texts, write_jsonl
from titan_moe.config.job_config import Dataset, Training
from titan_moe.data import content, file_corpus
from titan_moe.data.build import build_reader
from titan_moe.data.content import sampled_checksum
from titan_moe.data.step_reader import continue_state
from titan_moe.data.tokenize import tokenize_corpus
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.runtime.errors import RunError

TOKENIZER = load_tokenizer("bytes")
PLACE = {"seed": 3, "rank": 0, "num_ranks": 1, "global_batch_size": 4}


def write_files(folder, sizes, seed=0):
    draw = np.random.default_rng(seed)
    files = []
    for number, size in enumerate(sizes):
        files.append(folder / f"{number}.bin")
        files[-1].write_bytes(draw.integers(256, size=size, dtype=np.uint8).tobytes())
    return files


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def small_blocks(monkeypatch):
    """64 KiB in 32 blocks stand for 64 MiB in 512."""
    monkeypatch.setattr(content, "SAMPLED", 64 << 10)
    monkeypatch.setattr(content, "_BLOCK", 2 << 10)


@pytest.mark.parametrize("sizes", [[1], [5000], [100, 0, 3, 4000], [0, 64 << 10]])
def test_any_byte_of_a_small_set_shows(tmp_path, monkeypatch, sizes):
    small_blocks(monkeypatch)
    files = write_files(tmp_path, sizes)
    before = sampled_checksum(files)
    assert before == sampled_checksum(files)
    draw = random.Random(1)
    for path, size in zip(files, sizes, strict=True):
        for place in {0, size - 1, *(draw.randrange(size) for _ in range(20))} if size else ():
            flip(path, place)
            assert sampled_checksum(files) != before
            flip(path, place)
    assert sampled_checksum(files) == before


@pytest.mark.parametrize("sizes", [[(64 << 10) + 1], [300_000], [1000] * 200, [70_000, 5, 90_000]])
def test_a_large_set_is_sampled_evenly_and_cheaply(tmp_path, monkeypatch, sizes):
    small_blocks(monkeypatch)
    files = write_files(tmp_path, sizes)
    before, total = sampled_checksum(files), sum(sizes)
    pieces = list(content._pieces(files, sizes))
    read = set()
    for path, start, length in pieces:
        first = sum(sizes[: files.index(path)]) + start
        assert length > 0 and start + length <= sizes[files.index(path)]
        read |= set(range(first, first + length))
    assert sum(length for *_, length in pieces) <= (64 << 10) + 2 * (2 << 10)
    assert {0, total - 1} <= read
    part = -(-total // 16)  # Two of the 32 parts.
    assert all(read & set(range(at, at + part)) for at in range(0, total - part, 97))
    draw = random.Random(2)
    for place in draw.sample(sorted(read), 20):
        number, inside = 0, place
        while inside >= sizes[number]:
            inside -= sizes[number]
            number += 1
        flip(files[number], inside)
        assert sampled_checksum(files) != before
        flip(files[number], inside)
    assert sampled_checksum(files) == before


def section(folder, kind):
    common = {"seq_len": 64, "local_batch_size": 2, "repeat_dataset": True}
    if kind == "tokens":
        out = folder / "tokens"
        tokenize_corpus(ListCorpus(random_texts(200)), TOKENIZER, out, progress=lambda d, t: None)
        return Training(dataset="tokens", dataset_path=str(out), **common), next(
            out.glob("*.tokens")
        )
    path = folder / "data" / "a.json"
    write_jsonl(path, random_texts(200))
    if kind == "json":
        return Training(dataset="json", dataset_path=str(path), **common), path
    if kind == "stream":
        return Training(dataset="c4", dataset_path=str(path.parent), **common), path
    parts = [Dataset(dataset="synthetic"), Dataset(dataset="json", dataset_path=str(path))]
    return Training(blend=parts, **common), path


@pytest.mark.parametrize("kind", ["tokens", "json", "stream", "blend"])
def test_a_resume_over_changed_files_is_refused(tmp_path, kind):
    training, path = section(tmp_path, kind)
    reader = build_reader(training, TOKENIZER, **PLACE)
    reader.read_step()
    state = json.loads(json.dumps(reader.state_dict()))
    build_reader(training, TOKENIZER, **PLACE).load_state_dict(state)
    text = path.read_bytes()
    place = text.index(b"a", len(text) // 2)  # A letter of a text, or of an id.
    path.write_bytes(text[:place] + b"b" + text[place + 1 :])
    other = build_reader(training, TOKENIZER, **PLACE)
    assert other.identity.fingerprint == reader.identity.fingerprint
    with pytest.raises(RunError) as caught:
        other.load_state_dict(state)
    line = str(caught.value)
    assert "files have changed since the checkpoint" in line and "\n" not in line
    assert "put the old files back" in line and 'exclude_from_loading=["dataloader"]' in line
    assert (reader.identity.checksum in line) and (other.identity.checksum in line)
    assert reader.identity.checksum.startswith("-+") == (kind == "blend")


@pytest.mark.parametrize("kind", ["tokens", "json"])
def test_a_position_of_before_there_were_checksums_is_taken(tmp_path, kind):
    training, _ = section(tmp_path, kind)
    reader = build_reader(training, TOKENIZER, **PLACE)
    reader.read_step()
    state = json.loads(json.dumps(reader.state_dict()))
    del state["identity"]["checksum"]
    moved, _ = continue_state(state, reader.identity, reader.identity)
    for old in (state, moved):
        later = build_reader(training, TOKENIZER, **PLACE)
        later.load_state_dict(old)
        assert later.state_dict() == reader.state_dict()


def test_files_that_were_moved_are_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(file_corpus, "_SMALL", 0)
    training, path = section(tmp_path, "json")
    before = build_reader(training, TOKENIZER, **PLACE).identity
    path.parent.rename(tmp_path / "moved")
    moved = training.model_copy(update={"dataset_path": str(tmp_path / "moved" / "a.json")})
    assert build_reader(moved, TOKENIZER, **PLACE).identity == before


def test_sources_without_files_have_none():
    training = Training(dataset="synthetic", seq_len=64, local_batch_size=2)
    assert build_reader(training, TOKENIZER, **PLACE).identity.checksum == "-"
