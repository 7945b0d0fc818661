"""Streams of files that `datasets` reads: who reads which file, how many bytes, and resumes."""

import builtins
import gzip
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.damage import ODD_VALUES, places
from tests.fuzz.verdict import refused
from tests.support.documents import write_jsonl
from tests.support.streams import read, slow_sequences
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Training, Validation
from titan_moe.data.build import build_loader
from titan_moe.data.document_order import Split
from titan_moe.data.hub import HubStream
from titan_moe.data.step_reader import continue_state, merge_states
from titan_moe.data.stream_order import StreamOrder, count_partitions
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.runtime.errors import RunError

# What follows is compared with the order of a run that holds documents out.
HELD_OUT = Validation(enable=True)
TOKENIZER = load_tokenizer("bytes")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr(StreamOrder, "CURSOR_EVERY", 8)
    for file in range(12):
        texts = [f"<{file}.{number}>" * 12 for number in range(20 + 3 * file)]
        write_jsonl(tmp_path / f"part-{file:02d}.json", texts)
    return tmp_path


def loaders(hub, ranks, *, batch=8, repeat=True):
    section = Training(
        dataset="c4", dataset_path=str(hub), seq_len=64, local_batch_size=1, repeat_dataset=repeat
    )
    return [
        build_loader(
            section,
            TOKENIZER,
            validation=HELD_OUT,
            seed=3,
            rank=rank,
            num_ranks=ranks,
            global_batch_size=batch,
        )
        for rank in range(ranks)
    ]


def take(ranks, steps):
    return [
        [batch.tokens_BS.tolist() for loader in ranks for batch in loader.next_step()]
        for _ in range(steps)
    ]


def test_streamed_files_are_the_slow_reader_s(hub):
    files = [
        [json.loads(line)["text"] for line in path.read_text().splitlines()]
        for path in sorted(hub.iterdir())
    ]
    source = StreamOrder(
        "c4",
        HubStream("c4", str(hub), key="training."),
        split=Split.TRAIN,
        sequences=range(8),
        global_batch_size=8,
        repeat=True,
    )
    assert source.fingerprint == "hub:c4:files=12" and source.num_partitions == 8
    assert source.document(4, 1).name == "c4/1/4"
    expected = slow_sequences(files, 8, 90, train=True)
    for sequence in (0, 3, 7):
        found = read(source, sequence, range(sequence == 1, 90), batch=8)
        assert found == expected[sequence]


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2), (8, 1)])
def test_streams_of_many_files_resume_on_other_ranks(hub, before, after):
    reference = take(loaders(hub, 1), 60)
    first, second = loaders(hub, before), loaders(hub, after)
    assert take(first, 25) == reference[:25]
    state = json.loads(json.dumps(merge_states([loader.state_dict() for loader in first])))
    for loader in second:
        loader.load_state_dict(state)
    assert take(second, 35) == reference[25:]


def staged_names(hub, ranks, batches):
    """Names of the documents read in each stage of 6 steps, and the last position.

    ranks: 0 for as many as sequences."""
    state, before, names = None, None, []
    for batch in batches:
        current = loaders(hub, ranks or batch, batch=batch)
        if state is not None:
            moved, _ = continue_state(state, before, current[0].identity)
            for loader in current:
                loader.load_state_dict(moved)
        steps = [[b for loader in current for b in loader.next_step()] for _ in range(6)]
        names.append([batch.samples[0] for step in steps for batch in step])
        state = json.loads(json.dumps(merge_states([each.state_dict() for each in current])))
        before = current[0].identity
    return names, state


@pytest.mark.parametrize("batches", [(8, 4, 8), (8, 6, 2), (2, 8, 4)])
def test_stages_read_the_same_on_other_ranks_and_nothing_twice(hub, batches):
    names, state = staged_names(hub, 1, batches)
    assert (names, state) == staged_names(hub, 0, batches)
    assert len(state["marks"][0]) == count_partitions(12, batches[0])
    stages = [{name for sequence in stage for name in sequence} for stage in names]
    assert len(set.union(*stages)) == sum(map(len, stages))


def test_a_state_of_a_stream_with_another_number_of_files_is_refused(hub):
    state = merge_states([loader.state_dict() for loader in loaders(hub, 1)])
    write_jsonl(hub / "part-99.json", ["one more"])
    (other,) = loaders(hub, 1)
    with pytest.raises(RunError, match=r"hub:c4:files=12 as.* this run has .*hub:c4:files=13 as"):
        other.load_state_dict(state)


def test_bytes_read_by_a_rank_are_its_share(tmp_path, monkeypatch):
    """Each of 4 ranks reads a quarter of 16 files whole, but for the first file's schema."""
    from datasets.utils import file_utils

    for file in range(16):
        write_jsonl(tmp_path / f"part-{file:02d}.json", ["x" * 999] * 100)
    total = sum(path.stat().st_size for path in tmp_path.iterdir())
    counted = count_bytes(monkeypatch, file_utils)
    for rank in range(4):
        loader = loaders(tmp_path, 4, batch=16, repeat=False)[rank]
        counted.clear()
        with pytest.raises(RunError, match="ran out"):
            while True:
                loader.next_step()
        opened = {name for name in counted if counted[name]}
        assert len(opened) == 4
        assert sum(counted.values()) == pytest.approx(total / 4, rel=0.01)


def count_bytes(monkeypatch, module):
    """Bytes by file name that `module` has read since, filled in as it reads."""
    counted = Counter()

    def opening(name, mode="r", *args, **keys):
        file = builtins.open(name, mode, *args, **keys)  # noqa: SIM115
        return Counting(file, str(name), counted) if "b" in mode else file

    monkeypatch.setattr(module, "open", opening, raising=False)
    return counted


class Counting:
    """A binary file that counts what is read of it."""

    def __init__(self, file, name, counted):
        self.file, self.name, self.counted = file, name, counted

    def __getattr__(self, attribute):
        return getattr(self.file, attribute)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def read(self, size=-1):
        return self._count(self.file.read(size))

    def readline(self, size=-1):
        return self._count(self.file.readline(size))

    def _count(self, content):
        self.counted[self.name] += len(content)
        return content


@pytest.mark.parametrize("odd", ODD_VALUES, ids=range(len(ODD_VALUES)))
def test_a_place_in_a_hub_stream_that_is_none(tmp_path: Path, odd: object) -> None:
    write_jsonl(tmp_path / "a.json", ["x", "y", "z"])
    stream = HubStream("c4", str(tmp_path), key="training.")
    list(zip(range(2), stream.read(), strict=False))
    for inside, key in places(mark := json.loads(json.dumps(stream.mark()))):
        kept, inside[key] = inside[key], odd
        try:
            assert len(list(stream.read(mark))) <= 3
        except RunError as error:
            assert refused([str(error)]).kind == "refused", error
        except (TypeError, ValueError):
            pass  # As of data that cannot be read: reading a step puts it into a line.
        inside[key] = kept
    assert [document.content for document in stream.read(mark)] == ["z"]


def test_a_file_that_cannot_be_read_later_is_no_wrong_place(tmp_path: Path) -> None:
    """Where a run goes on is right: choosing another checkpoint would help nothing."""
    write_jsonl(tmp_path / "a.json", ["x", "y"])
    stream = HubStream("c4", str(tmp_path), key="training.")
    list(zip(range(1), stream.read(), strict=False))
    mark = stream.mark()

    class Failing:
        def load_state_dict(self, state: object) -> None: ...

        def __iter__(self) -> Iterator[dict[str, str]]:
            yield {"text": "y"}
            raise TypeError("Couldn't cast array of type list to string")

    stream._stream = Failing()
    with pytest.raises(TypeError, match="cast"):
        list(stream.read(mark))


def test_a_file_that_is_cut_between_two_lines_is_no_shorter_data(tmp_path: Path) -> None:
    """`datasets` reads 10 MiB at a time and takes the end of the file for the end of its data."""
    texts = [f"{number} " + "x" * 2000 for number in range(8000)]
    path = Path(write_jsonl(tmp_path / "a.jsonl", texts))
    lines = path.read_bytes().splitlines(keepends=True)
    stream = HubStream("c4", str(tmp_path), key="training.")
    seen = []
    with pytest.raises(RunError, match=rf"since the run began: {path} had [\d,]+ bytes and has "):
        for document in stream.read():
            if not seen:
                os.truncate(path, sum(map(len, lines[:7000])))
            seen.append(document.content)
    assert seen == texts[:7000]


def test_a_file_that_is_removed_while_it_is_open_is_read_to_its_end(tmp_path: Path) -> None:
    path = Path(write_jsonl(tmp_path / "a.jsonl", ["x", "y"]))
    stream = HubStream("c4", str(tmp_path), key="training.").read()
    assert next(stream).content == "x"
    path.unlink()
    assert [document.content for document in stream] == ["y"]


def test_a_copy_with_a_broken_file_is_not_taken_for_the_hub(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n')[:-9])
    with pytest.raises(ConfigError, match=r"^training\.dataset_path='.*', a copy of 'c4', cannot "):
        HubStream("c4", str(tmp_path), key="training.")
