from functools import partial

import pytest

from tests.support.documents import (
    TOKENIZER,
    build_loader,
    loaders_of,
    position,
    random_texts,
    slow_rows,
    take,
    training,
    write_files,
    write_hub,
    write_jsonl,
    write_ranks,
)
from tests.support.jobs import until
from tests.support.refusals import failure
from titan_moe.config.job_config import Dataset
from titan_moe.data.builtin import StdlibCorpus
from titan_moe.data.order import CorpusOrder, Split
from titan_moe.data.stream import StreamOrder
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.runtime.errors import RunError

ROWS = 8
loaders = partial(loaders_of, seed=3, rows=ROWS)


@pytest.fixture(params=["synthetic", "json, repeated", "stream", "files of unequal sizes", "blend"])
def section(request, tmp_path, monkeypatch):
    """Each kind of data."""
    monkeypatch.setattr(StreamOrder, "CURSOR_EVERY", 8)  # The ranks' marks must differ.
    write_files(tmp_path / "few", [90, 0, 7])
    texts = write_jsonl(tmp_path / "a.jsonl", random_texts(400))
    json = {"dataset": "json", "dataset_path": texts}
    c4 = {"dataset": "c4", "dataset_path": write_hub(tmp_path / "hub", random_texts(600, seed=1))}
    blend = [json | {"weight": 1}, c4 | {"weight": 2.5}, {"dataset": "synthetic", "weight": 0.5}]
    keys = {
        "synthetic": {"repeat_dataset": False},
        "json, repeated": json | {"mask_documents": False},
        "stream": c4,
        "files of unequal sizes": {"dataset": "c4", "dataset_path": str(tmp_path / "few")},
        "blend": {"blend": blend},
    }
    return training(**({"repeat_dataset": True} | keys[request.param]))


@pytest.mark.parametrize("mask", [True, False])
def test_rows_are_the_slow_packing_of_their_documents(mask):
    """Row b packs the documents at positions b, b + G, ... of the seeded order, EOS after each."""
    section = training(dataset="stdlib", seq_len=512, mask_documents=mask)
    steps = take(loaders(section, 1), 40)
    order = CorpusOrder("stdlib", StdlibCorpus(), split=Split(64), seed=3, epochs=1)
    for row in range(ROWS):
        documents = []
        for place in range(row, row + 12 * ROWS, ROWS):
            name, text = order.document(place)
            documents.append((name, [*text.encode(), TOKENIZER.eos_id]))
        expected = slow_rows(documents, seq_len=512, mask=mask)
        assert len(expected) >= 40
        assert [step[row] for step in steps] == expected[:40]


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2), (2, 1)])
def test_resume_under_another_number_of_ranks_reads_the_same_rows(section, before, after):
    reference = take(loaders(section, 1), 120)
    first = loaders(section, before)
    stop = {1: 1, 4: 37, 2: 83}[before]
    assert take(first, stop) == reference[:stop]
    state = position(first)
    second = loaders(section, after)
    take(second, 3)  # A loader that is under way already can be sent elsewhere too.
    for loader in second:
        loader.load_state_dict(state)
        assert loader.state_dict()["step"] == stop
    assert take(second, 120 - stop) == reference[stop:]


def test_reading_ahead_does_not_show_in_the_state():
    (eager,) = loaders(training(dataloader={"prefetch_factor": 6}), 1)
    (lazy,) = loaders(training(dataloader={"prefetch_factor": 1}), 1)
    for _ in range(4):
        eager.next_step()
        lazy.next_step()
        assert until(lambda: all(future.done() for future in eager._ahead), 10)
        assert len(eager._ahead) == 6
        assert eager.state_dict() == lazy.state_dict()


def test_without_repetition_each_document_is_read_once(tmp_path):
    texts = [f"<{number}>" * 20 for number in range(100)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    (loader,) = loaders(training(dataset="json", dataset_path=path), 1)
    read, step = [set() for _ in range(ROWS)], 1
    with pytest.raises(RunError) as error:
        while True:
            (sequences,) = take([loader], 1)
            step += 1
            for documents, (*_, names) in zip(read, sequences, strict=True):
                documents.update(names)
    line = str(error.value)
    assert line.startswith(f"step {step}: training.dataset='json' ran out: sequence ")
    assert "of the 99 documents" in line and "training.repeat_dataset=true" in line
    assert "\n" not in line
    assert sum(map(len, read)) == len(set.union(*read)) > 80
    with pytest.raises(RunError, match="ran out"):  # Not the step after it, without the lost data.
        loader.next_step()


def test_blend_weights_are_shares_of_tokens(tmp_path):
    short = write_jsonl(tmp_path / "short.jsonl", ["s" * 5] * 400)
    long = write_jsonl(tmp_path / "long.jsonl", ["l" * 150] * 200)
    section = training(
        repeat_dataset=True,
        blend=[
            Dataset(dataset="json", dataset_path=short, weight=3),
            Dataset(dataset="json", dataset_path=long, weight=1),
        ],
    )
    steps = take(loaders(section, 1), 60)
    for row in range(ROWS):
        tokens = [token for step in steps for token in step[row][0]]
        share = tokens.count(ord("l")) / len(tokens)
        assert share == pytest.approx(0.25, abs=0.06)
    assert len({tuple(tokens) for tokens, *_ in steps[0]}) > 1  # Not all start with one source.


def test_failing_read_is_one_line(monkeypatch):
    (loader,) = loaders(training(dataset="stdlib"), 1)
    monkeypatch.setattr(StdlibCorpus, "__getitem__", fail)
    line = failure(loader.next_step)
    assert line.startswith("step 1: reading the dataset 1 x stdlib") and "OSError: I/O" in line


def fail(corpus, index):
    raise OSError("I/O error on the disk\nsecond line")


@pytest.mark.parametrize(
    ("keys", "options", "line"),
    [
        ({"dataset": "stdlib"}, {}, 'fingerprint="1 x synthetic.*has fingerprint="1 x stdlib'),
        ({}, {"seed": 4}, "fingerprint=.*seed=0.*seed=4"),
        ({}, {"global_batch_size": 16}, "batch_size=8, this run has global_batch_size=16"),
        ({"seq_len": 32}, {}, "seq_len=64, this run has seq_len=32"),
        ({"append_eos": False}, {}, r'with training.append_eos="<\|eos\|>", .*eos=false: set it'),
        ({"prepend_bos": True}, {}, "training.prepend_bos=false, .*prepend_bos=true: set it"),
        ({"parse_special_tokens": True}, {}, "training.parse_special_tokens=false, .*=true: set"),
    ],
)
def test_state_of_another_stream_or_of_other_tokens_is_refused(keys, options, line):
    state, section = position([build_loader(training())]), training(**keys)
    other = build_loader(section, load_tokenizer("bytes", section), **options)
    with pytest.raises(RunError, match=line):
        other.load_state_dict(state)


def test_resume_with_another_tokenizer_names_the_key_and_both_values(tmp_path):
    paths = [write_ranks(tmp_path / name / "tokenizer.model") for name in ("first", "copy")]
    first, copy, other = (load_tokenizer(path) for path in (*paths, "bytes"))
    state = build_loader(training(), first).state_dict()
    build_loader(training(), copy).load_state_dict(state)  # Another path to the same.
    line = failure(build_loader(training(), other).load_state_dict, state)
    assert f"with model.tokenizer_path={paths[0]!r}, this run has 'bytes'" in line
    assert "exclude_from_loading" not in line and first.fingerprint not in line
    write_ranks(tmp_path / "first/tokenizer.model", merges=(b"ab",))
    with pytest.raises(RunError, match=r"tokenizer_path=.*whose files have changed since"):
        build_loader(training(), load_tokenizer(paths[0])).load_state_dict(state)
