"""Corpora: the built-in ones, local files that `datasets` reads, and changed files."""

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from tests.support.documents import TOKENIZER, build_loader, random_texts, write_hub, write_jsonl
from tests.support.refusals import refusal
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Training, Validation
from titan_moe.data import corpus as corpus_module
from titan_moe.data.build import build_reader
from titan_moe.data.builtin import StdlibCorpus, SyntheticCorpus
from titan_moe.data.check import check_data
from titan_moe.data.corpus import FileCorpus, Source, sampled_checksum
from titan_moe.data.sources import open_source, training_sources
from titan_moe.data.tokens import write_tokens
from titan_moe.runtime.errors import RunError

TEXTS = ["one\ntwo", "", "drei é", "four"]


def texts_of(corpus):
    return [corpus[index].content for index in range(len(corpus))]


def corpus_of(dataset, path, column="text"):
    return FileCorpus(Source("training.", dataset, str(path), column))


def test_stdlib_skips_tests_and_files_that_are_not_utf8(tmp_path):
    for name, content in [
        ("b.py", "b = 'é'\n".encode()),
        ("a/latin.py", b"# \xe9\n"),
        ("a/z.py", b"z\n"),
        ("a/test/t.py", b"t\n"),
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    corpus = StdlibCorpus(tmp_path)
    assert texts_of(corpus) == ["z\n", "b = 'é'\n"]
    (tmp_path / "b.py").write_text("b = 'è'\n")  # The file is as long as before.
    assert StdlibCorpus(tmp_path).fingerprint != corpus.fingerprint
    names = {document.name for document in StdlibCorpus()}
    assert "stdlib/json/decoder.py" in names and len(names) > 300


def test_synthetic_text_is_pinned():
    corpus = SyntheticCorpus(seed=0)
    text = "".join(corpus[index].content for index in (0, 1, 999_999))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "016177c78ec900b8"
    assert corpus[5].content != SyntheticCorpus(seed=1)[5].content


def test_files_folders_and_globs_are_read_without_a_network(tmp_path, monkeypatch):
    def refuse(*args):
        raise AssertionError("local files need no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    folder = tmp_path / "in"
    for name in ("a.jsonl", "sub/b.json"):
        write_jsonl(folder / name, TEXTS)
    assert texts_of(corpus_of("json", folder / "a.jsonl")) == TEXTS
    whole, globbed = corpus_of("json", folder), corpus_of("json", folder / "**" / "*.json")
    assert texts_of(whole) == TEXTS * 2 and texts_of(globbed) == TEXTS
    assert globbed.fingerprint != whole.fingerprint
    folder.rename(tmp_path / "moved")  # The same files elsewhere are the same corpus.
    assert corpus_of("json", tmp_path / "moved").fingerprint == whole.fingerprint


def test_the_column_is_in_the_fingerprint_and_text_has_none(tmp_path):
    (tmp_path / "a.json").write_text('{"text": "a title", "body": "a"}')
    body = corpus_of("json", tmp_path, "body")
    assert texts_of(body) == ["a"]
    assert body.fingerprint == corpus_of("json", tmp_path).fingerprint + ":column=body"
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n\nfour")
    paragraphs = texts_of(corpus_of("text", tmp_path, "body"))
    assert [text.strip() for text in paragraphs] == ["one\ntwo", "three", "four"]


def test_conversion_that_was_cut_short_is_refused(tmp_path):
    path, caches = tmp_path / "a.txt", Path(os.environ["HF_DATASETS_CACHE"])
    path.write_text("\n\n".join(f"{tmp_path} {number}" for number in range(3000)))
    before = set(caches.glob("texts_builder/**/*.arrow"))
    assert len(corpus_of("text", path)) == 3000
    (cache,) = set(caches.glob("texts_builder/**/*.arrow")) - before
    with pa.ipc.open_stream(cache.read_bytes()) as reader:
        table = reader.read_all()
    with pa.ipc.new_stream(cache, table.schema) as writer:
        writer.write_table(table.slice(0, 1000))
    with pytest.raises(ConfigError, match=rf"{cache.parent}.* is damaged: remove its folder"):
        corpus_of("text", path)


def test_c4_test_is_a_folder_of_torchtitans_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    missing = r"training.dataset_path='tests/assets/c4_test' does not exist"
    assert check_data(Training(dataset="c4_test"), Validation(), "bytes")[0].startswith(missing)
    write_jsonl(tmp_path / "tests" / "assets" / "c4_test" / "data.json", TEXTS)
    for path in (None, "tests/assets/c4_test/data.json"):
        (source,) = training_sources(Training(dataset="c4_test", dataset_path=path))
        assert texts_of(open_source(source, TOKENIZER, 0)) == TEXTS
        assert not source.is_stream


# --- Mistakes: each is one line that names key, value and remedy ----------------------------------


# Wrong without a look into the data: found by check_data too.
PATHS = [
    ({"dataset": "json"}, "training.dataset='json' needs training.dataset_path"),
    ({"dataset": "tokens"}, "training.dataset='tokens' needs training.dataset_path"),
    ({"dataset": "json", "dataset_path": "none"}, "none' does not exist"),
    ({"dataset": "text", "dataset_path": "."}, "holds no file that ends in .txt, packed or not"),
    ({"dataset": "json", "dataset_path": "empty.json"}, "empty.json' is empty"),
    ({"dataset": "tokens", "dataset_path": "."}, "no manifest.json .* titan-moe tokenize --out"),
    ({"dataset": "c4", "dataset_path": "none"}, "none' does not exist"),
    ({"dataset": "stdlib", "dataset_path": "."}, "has no use with training.dataset='stdlib'"),
    (
        {"blend": [{"dataset": "stdlib"}, {"dataset": "json", "dataset_path": "none"}]},
        r"training.blend\[1\].dataset_path='.*none' does not exist",
    ),
]
_COLUMN = {"dataset": "json", "dataset_path": "column.json"}
CONTENTS = [
    ({"dataset": "json", "dataset_path": "broken.json"}, "broken.json' cannot be read as json"),
    ({"dataset": "parquet", "dataset_path": "broken.json"}, "cannot be read as parquet"),
    (_COLUMN, "text_column='text': .*column.json' has no column 'text', but url, size: set "),
    (
        _COLUMN | {"text_column": "size"},
        "training.text_column='size': column 'size' of .*column.json' holds numbers, not text",
    ),
    (
        {"text_column": "url", "blend": [{"dataset": "stdlib"}, _COLUMN | {"text_column": "uri"}]},
        r"training.blend\[1\].text_column='uri': .* has no column 'uri', but url, size",
    ),
    (
        {"blend": [{"dataset": "stdlib"}, {"dataset": "json", "dataset_path": "few.json"}]},
        r"training.blend\[1\].dataset='json' has 5 documents to train on, fewer than the 8 "
        "sequences of training.global_batch_size.*training.repeat_dataset=true",
    ),
    ({"dataset": "stdlb"}, "training.dataset='stdlb' cannot be opened"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.json").touch()
    (tmp_path / "broken.json").write_text('{"text": "a"}\n{"text": ')
    (tmp_path / "column.json").write_text('{"url": "a", "size": 3}\n')
    write_jsonl(tmp_path / "few.json", ["text"] * 5)
    return tmp_path


@pytest.mark.parametrize(("keys", "line"), PATHS + CONTENTS)
def test_mistake_in_the_data_is_one_line(folder, keys, line):
    said = refusal(build_loader, Training(**keys))
    assert re.search(line, said) and "\n" not in said
    if (keys, line) in PATHS:
        assert check_data(Training(**keys), Validation(), "bytes") == [said]


def test_check_lists_every_mistake_at_once(folder):
    lines = check_data(
        Training(dataset="json", dataset_path="/none"),
        Validation(enable=True, dataset="tokens", dataset_path=str(folder)),
        "/no/tokenizer",
    )
    assert [line.split("=")[0] for line in lines] == [
        "model.tokenizer_path",
        "training.dataset_path",
        "validation.dataset_path",
    ]
    (endless,) = check_data(Training(dataset="c4"), Validation(enable=True), "bytes")
    assert endless.startswith("validation.steps=-1")
    assert check_data(Training(), Validation(enable=True), "bytes") == []


def test_start_on_the_default_data_imports_neither_torch_nor_datasets():
    program = (
        "import sys; from titan_moe.config.job_config import Training, Validation; "
        "from titan_moe.data.build import build_reader; "
        "from titan_moe.data.check import check_data; "
        "from titan_moe.data.tokenizer import load_tokenizer; "
        "assert check_data(Training(), Validation(), 'bytes') == []; "
        "section = Training(global_batch_size=8); "
        "build_reader(section, load_tokenizer('bytes'), seed=0).read_step(); "
        "assert not {'torch', 'datasets', 'pandas', 'pyarrow', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# --- Files that change in place, behind the same names and sizes ----------------------------------


@pytest.mark.parametrize("sizes", [[1], [100, 0, 3, 4000], [90_000, 5, 300_000]])
def test_checksum_shows_changes(tmp_path, monkeypatch, sizes):
    """A change of consecutive bytes shows if they are more than 1/16 of a large set."""
    monkeypatch.setattr(corpus_module, "SAMPLED", 64 << 10)
    monkeypatch.setattr(corpus_module, "_BLOCK", 2 << 10)
    files = [tmp_path / f"{number}.bin" for number in range(len(sizes))]
    for path, size in zip(files, sizes, strict=True):
        path.write_bytes(bytes(size))
    before = sampled_checksum(files)
    length = sum(sizes) // 16 if sum(sizes) > 64 << 10 else 1
    for path, size in zip(files, sizes, strict=True):
        for place in range(0, size - length + 1, max(1, (size - length) // 20)):
            path.write_bytes(bytes(place) + b"x" * length + bytes(size - place - length))
            assert sampled_checksum(files) != before
        path.write_bytes(bytes(size))
    assert sampled_checksum(files) == before


@pytest.mark.parametrize("kind", ["tokens", "json", "stream", "blend"])
def test_resume_over_changed_files_is_refused(tmp_path, kind):
    path = Path(write_jsonl(tmp_path / "data" / "a.json", random_texts(200)))
    keys = {"dataset": "json", "dataset_path": str(path)}
    if kind == "tokens":
        write_tokens(corpus_of("json", path), "bytes", tmp_path / "tokens")
        keys = {"dataset": "tokens", "dataset_path": str(tmp_path / "tokens")}
        path = tmp_path / "tokens" / "tokens.bin"
    elif kind == "stream":
        keys = {"dataset": "c4", "dataset_path": write_hub(tmp_path / "hub", random_texts(200))}
        path = tmp_path / "hub" / "part-04.json"
    elif kind == "blend":
        keys = {"blend": [{"dataset": "synthetic"}, keys]}
    keys |= {"seq_len": 64, "local_batch_size": 2, "global_batch_size": 4}
    training = Training(repeat_dataset=True, **keys)
    reader = build_reader(training, TOKENIZER, seed=3)
    reader.read_step()
    state = json.loads(json.dumps(reader.state_dict()))
    build_reader(training, TOKENIZER, seed=3).load_state_dict(state)
    content = path.read_bytes()
    changed = content.index(b"a", len(content) // 2)  # A letter of a text, or of an id.
    path.write_bytes(content[:changed] + b"b" + content[changed + 1 :])
    other = build_reader(training, TOKENIZER, seed=3)
    assert other.identity.fingerprint == reader.identity.fingerprint
    with pytest.raises(RunError, match=r"files have changed .*exclude_from_loading") as caught:
        other.load_state_dict(state)
    line = str(caught.value)
    assert reader.identity.checksum in line and other.identity.checksum in line
    assert reader.identity.checksum.startswith("-+") == (kind == "blend")
