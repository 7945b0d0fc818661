import gzip
import hashlib
import itertools
import json
import os
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard

from tests.support.documents import ListCorpus, write_jsonl
from titan_moe.config.errors import ConfigError
from titan_moe.data import file_corpus
from titan_moe.data.builtin import StdlibCorpus, SyntheticCorpus
from titan_moe.data.document_order import CorpusOrder, Split
from titan_moe.data.file_corpus import FileCorpus
from titan_moe.data.hub import HubStream
from titan_moe.data.sources import check_source, is_stream, open_source
from titan_moe.runtime.errors import RunError


def texts_of(corpus):
    return [corpus[index].content for index in range(len(corpus))]


@pytest.mark.parametrize("rows", [0, 1000])
def test_a_conversion_that_is_cut_short_is_no_shorter_data(tmp_path, rows):
    path, caches = tmp_path / "a.txt", Path(os.environ["HF_DATASETS_CACHE"])
    path.write_text("\n\n".join(f"{tmp_path} {number}" for number in range(3000)))
    before = set(caches.glob("text/**/*.arrow"))
    assert len(FileCorpus("text", str(path), key="training.")) == 3000
    (cache,) = set(caches.glob("text/**/*.arrow")) - before
    with pa.ipc.open_stream(cache.read_bytes()) as reader:
        table = reader.read_all()
    with pa.ipc.new_stream(cache, table.schema) as writer:
        writer.write_table(table.slice(0, rows))
    with pytest.raises(ConfigError, match=r"was read before and is kept in .* damaged .* remove"):
        FileCorpus("text", str(path), key="training.")


def test_stdlib_of_this_machine():
    corpus = StdlibCorpus()
    assert len(corpus) > 300
    names = [corpus[index].name for index in range(len(corpus))]
    assert "stdlib/json/decoder.py" in names
    assert not any("/test/" in name or "site-packages" in name for name in names)
    assert json.JSONDecodeError.__doc__ in corpus[names.index("stdlib/json/decoder.py")].content
    assert corpus.fingerprint == StdlibCorpus().fingerprint


def test_stdlib_skips_what_it_cannot_decode(tmp_path):
    (tmp_path / "b.py").write_text("b = 'é'\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "a" / "z.py").write_text("z\n")
    (tmp_path / "a" / "test").mkdir()
    (tmp_path / "a" / "test" / "t.py").write_text("t\n")
    corpus = StdlibCorpus(tmp_path)
    assert texts_of(corpus) == ["z\n", "b = 'é'\n"]
    before = corpus.fingerprint
    (tmp_path / "b.py").write_text("b = 'è'\n")  # As long as before.
    assert StdlibCorpus(tmp_path).fingerprint != before


def test_synthetic_text_is_pinned():
    corpus = SyntheticCorpus(seed=0)
    text = "".join(corpus[index].content for index in (0, 1, 999_999))
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest[:16] == "016177c78ec900b8"
    assert corpus[5].content != SyntheticCorpus(seed=1)[5].content


def test_synthetic_text_can_be_learned():
    """Knowing the previous word leaves at most four choices of 256 for the next."""
    corpus = SyntheticCorpus(seed=0)
    followers = {}
    for index in range(300):
        for sentence in corpus[index].content.lower().strip().rstrip(".").split(". "):
            for word, following in itertools.pairwise(sentence.split()):
                followers.setdefault(word, set()).add(following)
    assert len(followers) > 200
    assert max(len(words) for words in followers.values()) <= 4


TEXTS = ["one\ntwo", "", "drei é", "four"]


def write_text(path, texts=TEXTS):
    path.write_text("\n\n".join(texts))


def test_c4_test_is_a_folder_of_torchtitans_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    missing = r"training.dataset='c4_test' is tests/assets/c4_test of torchtitan's.*dataset=stdlib"
    for path in (None, "elsewhere"):
        with pytest.raises(ConfigError, match=missing) as error:
            check_source("c4_test", path, key="training.", tokenizer=None)
        assert len(error.value.lines) == 1
    write_jsonl(tmp_path / "tests" / "assets" / "c4_test" / "data.json", TEXTS)
    for path in (None, "tests/assets/c4_test", "tests/assets/c4_test/data.json"):
        corpus = open_source(
            "c4_test", path, key="training.", tokenizer="bytes", seed=0, text_column="text"
        )
        assert texts_of(corpus) == TEXTS
    assert not is_stream("c4_test") and is_stream("c4") and is_stream("c4_validation")


def test_json_plain_gzip_zstd_folder_glob(tmp_path):
    plain = write_jsonl(tmp_path / "in" / "a.jsonl", TEXTS)
    content = (tmp_path / "in" / "a.jsonl").read_bytes()
    (tmp_path / "in" / "sub").mkdir()
    (tmp_path / "in" / "sub" / "b.json.gz").write_bytes(gzip.compress(content))
    (tmp_path / "in" / "c.jsonl.zst").write_bytes(zstandard.compress(content))
    (tmp_path / "in" / "readme.md").write_text("not data")
    assert texts_of(FileCorpus("json", plain, key="training.")) == TEXTS
    folder = FileCorpus("json", str(tmp_path / "in"), key="training.")
    assert texts_of(folder) == TEXTS * 3
    globbed = FileCorpus("json", str(tmp_path / "in" / "**" / "*.gz"), key="training.")
    assert texts_of(globbed) == TEXTS
    assert globbed.fingerprint != folder.fingerprint
    # The same files elsewhere are the same corpus.
    (tmp_path / "in").rename(tmp_path / "moved")
    moved = FileCorpus("json", str(tmp_path / "moved"), key="training.")
    assert moved.fingerprint == folder.fingerprint


def test_small_json_is_what_datasets_reads(tmp_path, monkeypatch):
    """Two ways to one corpus: held in memory, and through `datasets`."""
    files = tmp_path / "files"
    write_jsonl(files / "a.jsonl", TEXTS)
    (files / "b.json").write_text('{"text": null}\r\n\n{"text": "a\\nb"}')
    write_jsonl(files / "c.jsonl", ["last"])
    direct = FileCorpus("json", str(files), key="training.")
    assert isinstance(direct._texts, list)
    monkeypatch.setattr(file_corpus, "_SMALL", 0)
    converted = FileCorpus("json", str(files), key="training.")
    assert not isinstance(converted._texts, list)
    assert texts_of(direct) == texts_of(converted) == [*TEXTS, "", "a\nb", "last"]
    assert direct.fingerprint == converted.fingerprint


@pytest.mark.parametrize(
    "content",
    ['[{"text": "an array"}]', '{"body": "x"}', '{"text": 3}', '{"text": "x"', '["text"]', ""],
)
def test_other_json_is_left_to_datasets(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_text(content)
    assert file_corpus._small_json_lines([path], "text") is None


def test_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"url": ["u"] * 3, "text": ["x", None, "y"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert texts_of(FileCorpus("parquet", str(tmp_path), key="training.")) == ["x", "", "y"]


def test_the_text_may_stand_in_another_column(tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    rows = [{"text": "a title", "body": text} for text in TEXTS]
    path = tmp_path / "a.json"
    path.write_text("\n".join(map(json.dumps, rows)))
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")

    def corpus(name="json", column="body"):
        file = tmp_path / f"a.{name}"
        return FileCorpus(name, str(file), text_column=column, key="training.")

    assert texts_of(corpus()) == texts_of(corpus("parquet")) == TEXTS
    assert corpus().fingerprint == corpus(column="text").fingerprint + ":column=body"
    monkeypatch.setattr(file_corpus, "_SMALL", 0)
    assert texts_of(corpus()) == TEXTS


def test_a_stream_s_text_may_stand_in_another_column(tmp_path):
    (tmp_path / "a.json").write_text('{"text": 1, "body": "x"}\n{"text": 2, "body": null}\n')

    def stream(column):
        return HubStream("c4", str(tmp_path), text_column=column, key="training.")

    assert [document.content for document in stream("body").read()] == ["x", ""]
    assert stream("body").fingerprint == "hub:c4:column=body"
    assert stream("text").fingerprint == "hub:c4"
    problems = [document.problem for document in stream("text").read()]
    assert problems == ["holds int, not text"] * 2
    with pytest.raises(RunError, match="no such column, but text, body: set training"):
        next(stream("url").read())


def test_text_is_paragraphs(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n\nfour")
    assert [t.strip() for t in texts_of(FileCorpus("text", str(tmp_path), key="training."))] == [
        "one\ntwo",
        "three",
        "four",
    ]


def local_hub(folder, count=3000):
    """A local copy of a "hub" dataset in three files."""
    third = count // 3
    for number in range(3):
        texts = [f"document {index}" for index in range(number * third, (number + 1) * third)]
        write_jsonl(folder / f"part-{number}.json", texts)
    return str(folder)


def test_a_stream_goes_on_from_its_mark(tmp_path):
    stream = HubStream("c4", local_hub(tmp_path), key="training.")
    whole = [document.content for document in stream.read()]
    assert whole == [f"document {index}" for index in range(3000)]
    reading = stream.read()
    for _ in range(1700):
        next(reading)
    mark = json.loads(json.dumps(stream.mark()))
    fresh = HubStream("c4", str(tmp_path), key="training.")
    assert [document.content for document in fresh.read(mark)] == whole[1700:]
    assert [document.content for document in fresh.read()] == whole


def test_a_mark_of_an_only_file_is_one_of_the_stream(tmp_path):
    """Earlier versions kept the stream's in checkpoints."""
    write_jsonl(tmp_path / "a.json", [f"document {index}" for index in range(300)])
    stream = HubStream("c4", str(tmp_path), key="training.")
    for _ in zip(range(120), stream.read(), strict=False):
        pass
    found = [document.content for document in stream.file(0).read(stream.mark())]
    assert found == [f"document {index}" for index in range(120, 300)]


@pytest.mark.parametrize("size", [2, 5, 64, 200])
def test_training_never_sees_held_out_documents(size):
    corpus = ListCorpus([str(number) for number in range(size)])

    def read(split, seed):
        order = CorpusOrder("list", corpus, split=split, seed=seed, repeat=False)
        return [order.document(position).content for position in range(order.size)]

    held_out = read(Split.HELD_OUT, None)
    assert len(held_out) == max(1, size // 64)
    for seed in (0, 1):
        assert sorted(read(Split.TRAIN, seed) + held_out) == sorted(corpus.texts)


def test_epochs_have_orders_of_their_own():
    corpus = ListCorpus([str(number) for number in range(100)])
    order = CorpusOrder("list", corpus, split=Split.TRAIN, seed=0, repeat=True)
    epochs = [
        [order.document(epoch * order.size + index).content for index in range(order.size)]
        for epoch in range(3)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert len({tuple(epoch) for epoch in epochs}) == 3
    # A jump back finds the same again.
    assert order.document(5).content == epochs[0][5]


def test_the_revision_of_a_hub_dataset_is_in_its_fingerprint(tmp_path, monkeypatch):
    """The hub is a stub: a local copy's builder that has a commit for its hash."""
    import datasets

    write_jsonl(tmp_path / "hub" / "a.json", ["one", "two"])
    local = datasets.load_dataset_builder
    asked = []

    def load_dataset_builder(repository, configuration, revision):
        asked.append((repository, configuration, revision))
        builder = local(str(tmp_path / "hub"))
        builder.hash = revision or "c0ffee"
        return builder

    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    latest = HubStream("owner/name:part", None, key="training.")
    assert latest.fingerprint == "hub:owner/name:part:revision=c0ffee"
    pinned = HubStream("c4@badf00d", None, key="training.")
    assert pinned.fingerprint == "hub:c4@badf00d:revision=badf00d"
    assert asked == [("owner/name", "part", None), ("allenai/c4", "en", "badf00d")]
