"""Documents without a text that can be read: counted, named by file and row, refused beyond a
share; the documents around them stay as they are."""

import gzip
import json
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
import zstandard

from tests.support.commands import run_command
from tests.support.documents import ListCorpus, random_texts, write_jsonl
from titan_moe import train_data
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Dataset, Training, Validation
from titan_moe.data import build, file_corpus
from titan_moe.data.bad_documents import BadDocuments, refusal
from titan_moe.data.build import build_loader, build_reader, build_validation
from titan_moe.data.builtin import StdlibCorpus
from titan_moe.data.file_corpus import FileCorpus
from titan_moe.data.hub import HubStream
from titan_moe.data.reader_process import ReaderProcess
from titan_moe.data.step_reader import bad_documents, continue_state, merge_states
from titan_moe.data.tokenize import tokenize_corpus
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.runtime.errors import RunError

TOKENIZER = load_tokenizer("bytes")

LATIN = b'{"text": "\xe9t\xe9"}'
KINDS = {
    "null": (b'{"text": null}', "has no text"),
    "missing": (b'{"id": 3}', "has no text"),
    "surrogate": (b'{"text": "\\ud800 x"}', "holds half of a surrogate pair"),
    "number": (b'{"text": 0}', "holds int, not text"),
    "list": (b'{"text": ["a", "b"]}', "holds list, not text"),
    "latin": (LATIN, "is not UTF-8"),
    "utf-16": (b'{"text": "a\\u0000b\\u0000"}', "holds NUL characters, as UTF-16 or binary"),
}
GOOD = [f"text number {number}" for number in range(40)]


def write_bad(path, texts, bad):
    """`bad`: lines by row."""
    lines = [json.dumps({"text": text}).encode() for text in texts]
    for row, line in bad.items():
        lines[row] = line
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


@pytest.mark.parametrize("small", [16 << 20, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_named_with_its_file_and_row(tmp_path, monkeypatch, kind, small):
    monkeypatch.setattr(file_corpus, "_SMALL", small)
    line, problem = KINDS[kind]
    write_jsonl(tmp_path / "a.json", GOOD[:3])  # The types that `datasets` expects of the second.
    write_bad(tmp_path / "b.json", GOOD, {7: line})
    corpus = FileCorpus("json", str(tmp_path), key="training.")
    found = [corpus[index] for index in range(len(corpus))]
    assert [document.content for document in found] == [*GOOD[:3], *GOOD[:7], "", *GOOD[8:]]
    assert [document.name for document in found if document.problem] == ["json/10"]
    assert found[10].problem.startswith(problem)
    assert found[10].problem.endswith(f"({tmp_path}/b.json, line 8)")


def test_lines_are_counted_from_1_with_blank_ones(tmp_path):
    """As an editor counts them."""
    path = tmp_path / "a.json"
    path.write_text('\n{"text": "x"}\n\n{"text": "y"}\n \n{"text": null}\n')
    corpus = FileCorpus("json", str(path), key="training.")
    assert corpus[2].problem == f"has no text ({path}, line 6)"


@pytest.mark.parametrize("small", [16 << 20, 0])
def test_a_line_that_is_no_json_is_named_by_its_number(tmp_path, monkeypatch, small):
    monkeypatch.setattr(file_corpus, "_SMALL", small)
    path = write_bad(tmp_path / "a.json", GOOD, {30: b'{"text": "x"'})
    with pytest.raises(ConfigError, match=rf"cannot be read as json: line 31 of {path}: "):
        FileCorpus("json", path, key="training.")


def test_an_empty_text_is_a_text(tmp_path):
    corpus = FileCorpus("json", write_jsonl(tmp_path / "a.json", ["", "x"]), key="training.")
    assert [corpus[index].problem for index in range(2)] == ["", ""]


def test_rows_of_parquet_compressed_and_array_files(tmp_path):
    import pyarrow
    import pyarrow.parquet

    for name, texts in (("a", ["x"] * 5), ("b", ["y", None])):
        table = pyarrow.table({"text": pyarrow.array(texts, pyarrow.string())})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    corpus = FileCorpus("parquet", str(tmp_path), key="training.")
    assert corpus[6].problem == f"has no text ({tmp_path}/b.parquet, row 2)"
    (tmp_path / "b.json").write_text('{"text": null}')
    for ending, compress in ((".gz", gzip.compress), (".zst", zstandard.compress)):
        packed = tmp_path / f"a.json{ending}"
        packed.write_bytes(compress(50 * b'{"text": "x"}\n\n'))
        corpus = FileCorpus("json", str(tmp_path), key="training.")
        assert corpus[50].problem == f"has no text ({tmp_path}/b.json, line 1)"
        packed.unlink()
    (tmp_path / "a.json").write_text('[{"text": "x"},\n{"text": "y"}]')
    corpus = FileCorpus("json", str(tmp_path), key="training.")
    assert corpus[2].problem == "has no text (row 3 of the 2 files taken together)"


def test_paragraphs_of_text_files_are_no_rows_of_theirs(tmp_path):
    (tmp_path / "a.txt").write_text("one\nline more\n\ntwo\n")
    (tmp_path / "b.txt").write_text("x\0\n")
    corpus = FileCorpus("text", str(tmp_path), key="training.")
    assert len(corpus) == 3
    assert corpus[2].problem.endswith("(row 3 of the 2 files taken together)")


def test_texts_of_a_stream_with_other_types_are_not_read_in_quotes(tmp_path):
    write_bad(tmp_path / "a.json", GOOD, {7: b'{"text": 0}'})
    found = []
    with suppress(Exception):  # Each version of `datasets` has its own.
        for document in HubStream("c4", str(tmp_path), key="training.").read():
            found.append(document.content)
    assert found == GOOD[: len(found)]


def test_the_share():
    def refused(number, *, seen, size=None, most=0.01):
        return bool(refusal("x", BadDocuments(number), seen=seen, size=size, most=most))

    assert not refused(10, seen=12) and refused(11, seen=12)  # Of a stream: of 1,000 at least.
    assert not refused(1, seen=1, size=100) and refused(2, seen=2, size=100)
    assert not refused(50, seen=5000, size=10**6) and refused(51, seen=5000, size=10**6)
    assert not refused(0, seen=10, most=0) and refused(1, seen=10**6, most=0)
    assert not refused(10, seen=10, size=10, most=1)


def training(path, **keys):
    common = {"dataset": "json", "dataset_path": path, "seq_len": 64, "local_batch_size": 2}
    return Training(**(common | keys))


PLACE = {"seed": 3, "rank": 0, "num_ranks": 1, "global_batch_size": 4}


def test_what_shows_at_once_is_refused_before_the_first_step(tmp_path):
    path = write_bad(tmp_path / "a.json", GOOD, {3: b'{"text": null}', 30: b'{"id": 1}'})
    with pytest.raises(ConfigError) as caught:
        build_reader(training(path), TOKENIZER, **PLACE)
    (line,) = caught.value.lines
    assert line == (
        f"training.dataset_path='{path}': 2 of 40 documents have no text that can be read, more "
        "than training.max_bad_documents=0.01 allows; the first: json/3 has no text "
        f"({path}, line 4). Mend or remove them, name the column of the text with "
        "training.text_column, or raise training.max_bad_documents"
    )
    build_reader(training(path, max_bad_documents=0.05), TOKENIZER, **PLACE)


@pytest.mark.parametrize("dataset", ["json", "c4"])
def test_what_shows_in_reading_is_refused_there(tmp_path, monkeypatch, dataset):
    monkeypatch.setattr(file_corpus, "_SMALL", 0)
    texts = random_texts(3000)
    bad = dict.fromkeys(range(0, 3000, 7), KINDS["utf-16"][0])
    path = write_bad(tmp_path / "a.json", texts, bad)
    path = path if dataset == "json" else str(tmp_path)
    loader = build_loader(training(path, dataset=dataset), TOKENIZER, **PLACE)
    with pytest.raises(RunError) as caught:
        for _ in range(2000):
            loader.next_step()
    line = str(caught.value)
    assert line.startswith("step ") and f"training.dataset='{dataset}': 11 of " in line
    assert "training.max_bad_documents=0.01" in line and "\n" not in line
    assert (
        "a.json, line " in line if dataset == "json" else "c4/" in line and "(file 1, row" in line
    )
    loader.close()


def steps(loaders, count):
    batches = [[b for loader in loaders for b in loader.next_step()] for _ in range(count)]
    return [[batch.tokens_BS.tolist() for batch in step] for step in batches]


def blend(tmp_path):
    # NUL characters: what does not show at once.
    bad = dict.fromkeys(range(0, 400, 9), KINDS["utf-16"][0])
    for name, lines in (("a", bad), ("b", {}), ("hub/c", bad)):
        write_bad(tmp_path / f"{name}.json", random_texts(400), lines)
    parts = [("json", "a.json"), ("json", "b.json"), ("c4", "hub")]
    blended = [Dataset(dataset=name, dataset_path=str(tmp_path / path)) for name, path in parts]
    keys = {"dataset": "json", "seq_len": 64, "local_batch_size": 2, "repeat_dataset": True}
    return Training(**keys, blend=blended, max_bad_documents=1)


def totals(state):
    read, before = bad_documents(state, 3)
    return [a + b for a, b in zip(read, before, strict=True)]


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2)])
def test_the_count_survives_a_resume_on_other_ranks(tmp_path, before, after):
    section = blend(tmp_path)

    def loaders(ranks):
        place = {"seed": 3, "num_ranks": ranks, "global_batch_size": 8}
        return [build_loader(section, TOKENIZER, rank=rank, **place) for rank in range(ranks)]

    (reference,) = whole = loaders(1)
    steps(whole, 60)
    expected = totals(reference.state_dict())
    assert expected[0].number > 3 and expected[1].number == 0 and expected[2].number > 3
    first = loaders(before)
    steps(first, 25)
    state = json.loads(json.dumps(merge_states([each.state_dict() for each in first])))
    assert 0 < totals(state)[0].number < expected[0].number
    second = loaders(after)
    for each in second:
        each.load_state_dict(state)
    steps(second, 35)
    found = totals(merge_states([each.state_dict() for each in second]))
    assert [part.number for part in found] == [part.number for part in expected]


def test_the_count_survives_another_batch_and_the_process_boundary(tmp_path):
    section, place = blend(tmp_path), {"seed": 3, "rank": 0, "num_ranks": 1}
    far = ReaderProcess(section, "bytes", global_batch_size=8, **place)
    for _ in range(20):
        _, state = far.read_step()
    far.close()
    numbers = [part.number for part in totals(state)]
    assert numbers[0] > 0
    other = build_reader(section, TOKENIZER, global_batch_size=4, **place)
    moved, _ = continue_state(state, far.identity, other.identity)
    other.load_state_dict(moved)
    assert [part.number for part in totals(other.state_dict())] == numbers
    for _ in range(20):
        other.read_step()
    assert totals(other.state_dict())[0].number > numbers[0]


def test_good_data_leaves_no_trace_and_bad_data_moves_nothing(tmp_path):
    texts = random_texts(200)
    good = build_loader(training(write_jsonl(tmp_path / "a.json", texts)), TOKENIZER, **PLACE)
    expected = steps([good], 20)
    assert "bad" not in json.dumps(good.state_dict())
    emptied = ["" if row % 9 == 0 else text for row, text in enumerate(texts)]
    path = write_jsonl(tmp_path / "empty.json", emptied)
    empty = steps([build_loader(training(path), TOKENIZER, **PLACE)], 20)
    path = write_bad(tmp_path / "b.json", texts, dict.fromkeys(range(0, 200, 9), LATIN))
    section = training(path, max_bad_documents=1)
    assert steps([build_loader(section, TOKENIZER, **PLACE)], 20) == empty != expected


def test_stdlib_files_left_out_are_counted(tmp_path):
    (tmp_path / "a.py").write_bytes(b"# \xe9\n")
    (tmp_path / "b.py").write_text("b\n")
    assert StdlibCorpus(tmp_path).left_out == BadDocuments(1, f"{tmp_path}/a.py is not UTF-8")


def test_files_left_out_beyond_the_share_are_refused(monkeypatch):
    corpus = ListCorpus(GOOD)
    corpus.left_out = BadDocuments(2, "x.py is not UTF-8")
    monkeypatch.setattr(build, "open_source", lambda *names, **how: corpus)
    section = Training(dataset="stdlib", seq_len=64, local_batch_size=2)
    with pytest.raises(ConfigError, match=r"'stdlib': 2 of 42 documents .* x\.py is not UTF-8"):
        build_reader(section, TOKENIZER, **PLACE)


def test_validation_refuses_and_reports(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(file_corpus, "_SMALL", 0)
    path = write_bad(tmp_path / "a.json", GOOD, {3: LATIN})

    def read(most):
        section = training(write_jsonl(tmp_path / "good.json", GOOD), max_bad_documents=most)
        keys = {"enable": True, "dataset": "json", "dataset_path": path, "local_batch_size": 1}
        keys = {"seed": 0, "rank": 0, "num_ranks": 1} | {"validation": Validation(**keys)}
        return list(build_validation(training=section, tokenizer=TOKENIZER, **keys))

    with pytest.raises(RunError, match=r"validation: .*'json': 1 of 40 .* json/3 is not UTF-8"):
        read(0.02)
    assert read(0.03) and "1 documents have no text" in caplog.text and "line 4" in caplog.text


def test_tokenize_counts_across_a_kill_and_refuses(tmp_path, monkeypatch):
    texts = random_texts(1500)
    path = write_bad(tmp_path / "a.json", texts, dict.fromkeys((5, 700, 1400), LATIN))
    monkeypatch.setattr(file_corpus, "_SMALL", 0)
    calls = iter(range(4))

    def killed(documents, tokens):
        if next(calls, None) is None:
            raise KeyboardInterrupt

    def write(**keys):
        corpus = FileCorpus("json", path, key="training.")
        keys = {"shard_tokens": 20_000, "progress": lambda d, t: None} | keys
        return tokenize_corpus(corpus, TOKENIZER, tmp_path / "out", **keys)

    with pytest.raises(KeyboardInterrupt):
        write(progress=killed)
    manifest, bad = write()
    assert manifest.documents == 1500 and bad.number == 3 and "line 6" in bad.first
    keys = {"shard_tokens": 20_000, "progress": lambda d, t: None, "max_bad_documents": 0.001}
    corpus = FileCorpus("json", path, key="training.")
    with pytest.raises(RunError, match=r"2 of 768 documents .*max_bad_documents=0.001"):
        tokenize_corpus(corpus, TOKENIZER, tmp_path / "other", **keys)


def test_the_tokenize_command_says_it(tmp_path):
    path = write_bad(tmp_path / "a.json", GOOD * 5, {3: b"{}"})
    words = ["--training.dataset", "json", "--training.dataset_path", path]
    done = run_command("tokenize", "--out", tmp_path / "out", *words)
    assert done.returncode == 0 and "1 documents have no text" in done.stdout
    strict = ["--training.max_bad_documents", "0"]
    done = run_command("tokenize", "--out", tmp_path / "strict", *words, *strict)
    assert done.returncode == 2 and "1 of 200 documents" in done.stderr
    assert not (tmp_path / "strict").exists()


def test_the_log_of_a_run_doubles(monkeypatch, caplog):
    """With two ranks of which the other one reads bad documents."""
    others = iter([0, 3, 4, 6, 6])
    monkeypatch.setattr(train_data.dist, "all_reduce", lambda x: x.add_(next(others)))

    def gather(found, mine):
        found[:] = [mine, ["json/1 has no text"]]

    monkeypatch.setattr(train_data.dist, "all_gather_object", gather)
    process = SimpleNamespace(device=torch.device("cpu"), world_size=2, is_main=True)
    log = train_data._BadDocumentLog(["training.dataset='json'"], process)
    state = {"rows": {"0": {}}}
    assert [log.count(step, state, mine=True) for step in range(5)] == [0, 3, 4, 6, 6]
    log.say_all()
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(" documents")[0] for line in lines] == [
        "training.dataset='json', by step 1: 3",
        "training.dataset='json', by step 3: 6",
        "training.dataset='json', in all: 6",
    ]
    assert all(line.endswith("json/1 has no text") for line in lines)


def test_json_that_nests_too_deep_is_one_line(tmp_path):
    path = tmp_path / "deep.jsonl"
    path.write_text('{"text": "fine"}\n{"text": ' + 100_000 * "[" + 100_000 * "]" + "}\n")
    with pytest.raises(ConfigError) as error:
        FileCorpus("json", str(path), key="training.")
    (line,) = error.value.lines
    assert "cannot be read as json" in line and "\n" not in line and "Error" not in line
