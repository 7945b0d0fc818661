"""Files as people lay them out: odd names, differing columns, damaged encodings."""

import bz2
import codecs
import gzip
import io
import json
import lzma
import os
import tarfile
import zipfile

import pyarrow as pa
import pyarrow.parquet
import pytest
import tokenizers
import zstandard

from tests.support.documents import write_jsonl
from tests.support.jobs import run_train
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Training, Validation
from titan_moe.config.parse import load_job
from titan_moe.data.check import data_notes
from titan_moe.data.corpus import FileCorpus, Source
from titan_moe.data.stream import HubStream
from titan_moe.data.tokenizer import load_tokenizer


@pytest.fixture(params=["local", "stream"])
def reader(request):
    return request.param


def texts(reader, path, dataset="json", column="text"):
    """The texts of files, read as a local dataset or streamed as a copy of a hub dataset."""
    if reader == "local":
        corpus = FileCorpus(Source("training.", dataset, str(path), column))
        return [corpus[index].content for index in range(len(corpus))]
    stream = HubStream(Source("training.", "c4", str(path), column))
    return [document.content for document in stream.read()]


def json_lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def parquet(**columns):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pa.table(columns), file)
    return file.getvalue()


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


# --- Names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", ["json", "text"])
@pytest.mark.parametrize("mark", ["[1]", "?", "*", "::", "[!a]", "%20 #"])
def test_a_name_that_exists_is_that_file(tmp_path, reader, dataset, mark):
    """Beside each name with a pattern's characters lies one that the pattern matches."""
    end = {"json": ".jsonl", "text": ".txt"}[dataset]
    for folder in (f"run{mark}", "run1", "runx"):
        for name in (f"part{mark}", "part1", "partx"):
            text = f"{folder}/{name}"
            content = json_lines({"text": text}) if dataset == "json" else text.encode()
            write(tmp_path / folder, {f"{name}{end}": content})
    if (reader, mark) == ("stream", "::"):
        with pytest.raises(ConfigError, match=r"cannot be opened: rename .*::"):
            texts(reader, tmp_path / "run1", dataset)
        return
    for folder in ("run1", f"run{mark}"):
        found = texts(reader, tmp_path / folder, dataset)
        assert sorted(found) == sorted(f"{folder}/{n}" for n in (f"part{mark}", "part1", "partx"))
        file = tmp_path / folder / f"part{mark}{end}"
        assert texts(reader, file, dataset) == [f"{folder}/part{mark}"]
    globbed = texts("local", tmp_path / f"run{mark}" / f"part?{end}", dataset)
    assert len(globbed) == {"?": 1, "*": 3}.get(mark, 2)
    assert all(text.startswith(f"run{mark}/") for text in globbed)


OTHERS = [
    ".b.jsonl", ".cache/c.jsonl", ".ipynb_checkpoints/a-checkpoint.jsonl", "__MACOSX/._a.jsonl",
    "a.jsonl~", "#a.jsonl#", "a.jsonl.bak", "a.jsonl.swp", "~$a.jsonl", ".DS_Store", "readme.md",
    "dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json",
]  # fmt: skip


def test_hidden_files_copies_and_descriptions_are_not_data(tmp_path, reader):
    write(tmp_path, dict.fromkeys(OTHERS, b'{"features": {"text": "int64"}}'))
    write(tmp_path, {"a.jsonl": json_lines({"text": "a"}), "b/c.jsonl": json_lines({"text": "c"})})
    assert texts(reader, tmp_path) == ["a", "c"]
    dataset = "json" if reader == "local" else "c4"
    (note,) = data_notes(Training(dataset=dataset, dataset_path=str(tmp_path)), Validation())
    assert f"{len(OTHERS)} files there are not read as data: " in note and note.count(",") == 3
    if reader == "local":
        assert texts(reader, tmp_path / "**" / "*") == ["a", "c"]
        assert texts(reader, tmp_path / "a.jsonl~", column="features.text") == ["int64"]


def test_files_of_other_formats_and_linked_folders_are_named(tmp_path, reader):
    """`datasets` streams the format that most files have."""
    folder = tmp_path / "a"
    write(folder, {f"{n}.jsonl": json_lines({"text": n}) for n in "12"} | {"3.csv": b"text\nc\n"})
    write(folder, {"4.parquet": parquet(text=["p"])})
    (folder / "5").symlink_to(tmp_path)
    assert texts(reader, folder) == ["1", "2"]
    dataset = "json" if reader == "local" else "c4"
    (note,) = data_notes(Training(dataset=dataset, dataset_path=str(folder)), Validation())
    assert all(name in note for name in ("3 files", "3.csv", "4.parquet", " 5"))


def test_a_name_need_not_be_utf8(tmp_path, reader):
    write(tmp_path, {os.fsdecode(b"caf\xe9.jsonl"): json_lines(A)})
    assert texts(reader, tmp_path) == ["a"]


def zipped(content):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.jsonl", content)
    return file.getvalue()


def test_a_folder_is_read_in_every_compression(tmp_path, reader):
    """Several frames or members in one file, too."""
    pack = {
        "": bytes, "gz": gzip.compress, "zst": zstandard.compress, "bz2": bz2.compress,
        "xz": lzma.compress,
    }  # fmt: skip
    for end, compress in pack.items():
        one, two = (compress(json_lines({"text": end + more})) for more in "12")
        write(tmp_path, {f"a.jsonl.{end}".strip("."): one + two})
    write(tmp_path, {"a.jsonl.zip": zipped(json_lines({"text": "zip1"}, {"text": "zip2"}))})
    wanted = [end + more for end in [*pack, "zip"] for more in "12"]
    assert sorted(texts(reader, tmp_path)) == sorted(wanted)
    write(tmp_path, {"b/plain.jsonl.gz": json_lines({"text": "plain"})})
    assert texts(reader, tmp_path / "b") == ["plain"]


# --- Columns --------------------------------------------------------------------------------------

A, B = {"text": "a"}, {"text": "b"}
DIFFERING = {
    "an additional column": [json_lines(A), json_lines(B | {"x": 1})],
    "another struct": [json_lines(A | {"m": {"x": 1}}), json_lines(B | {"m": {"y": [1]}})],
    "null, then string": [json_lines(A | {"x": None}, B | {"x": "s"})],
    "int, then string": [json_lines(A | {"x": 1}, B | {"x": "s"})],
    "date, then text": [json_lines(A | {"d": "2020-01-01"}), json_lines(B | {"d": "soon"})],
    "a late key": [json_lines(*[A | {"text": "a" * 10**6}] * 11, A, B | {"x": {"y": 1}})],
    "a text that is null at first": [json_lines({"text": None}, A), json_lines(B)],
    "a huge integer": [b'{"x": ' + b"9" * 5000 + b', "text": "a"}\n', json_lines(B)],
    "Latin-1 beside the text": [b'{"by": "Jos\xe9", "text": "a"}\n', json_lines(B)],
    "a list": [json.dumps([A, B], indent=1).encode()],
    "a record over several lines": [json.dumps(A, indent=1).encode(), json.dumps(B).encode()],
    "additional Parquet column": [parquet(text=["a"]), parquet(text=["b"], x=[1])],
    "other Parquet types": [parquet(text=["a"], x=[1]), parquet(text=["b"], x=[{"y": "s"}])],
    "an empty part first": [parquet(text=pa.array([], pa.int8())), parquet(text=["a", "b"])],
    "a part of nulls": [parquet(text=pa.nulls(1)), parquet(text=["a", "b"])],
    "string_view": [parquet(text=pa.array(["a"], pa.string_view())), parquet(text=["b"])],
    "large_string": [parquet(text=["a"]), parquet(text=pa.array(["b"], pa.large_string()))],
    "categories": [parquet(text=pa.array(["a", "b"]).dictionary_encode())],
}


@pytest.mark.parametrize("case", DIFFERING)
def test_columns_that_nobody_reads_do_not_matter(tmp_path, reader, case):
    contents = DIFFERING[case]
    form = "parquet" if contents[0].startswith(b"PAR1") else "json"
    write(tmp_path, {f"{number}.{form}": content for number, content in enumerate(contents)})
    found = texts(reader, tmp_path, form)
    assert [text for text in found if text and len(text) == 1] == ["a", "b"]


def test_a_path_names_a_nested_text(tmp_path, reader):
    lines = json_lines({"doc": {"text": "a"}}, {"doc": "b"}, {"doc.text": "c"})
    write(tmp_path / "a", {"a.jsonl": lines})
    rows = [{"text": "a", "n": 1}, None, {"text": "c", "n": 2}]
    write(tmp_path / "b", {"a.parquet": parquet(doc=rows, text=[1, 2, 3])})
    mixed = pa.array(['{"text": "a"}', '"b"', '{"text": "c", "n": [2]}'], pa.json_(pa.string()))
    write(tmp_path / "c", {"a.parquet": parquet(doc=mixed)})  # Of `datasets` 5.
    for folder, form in (("a", "json"), ("b", "parquet"), ("c", "parquet")):
        assert texts(reader, tmp_path / folder, form, "doc.text") == ["a", None, "c"]
        with pytest.raises(ConfigError, match=r"no column 'body', but doc"):
            texts(reader, tmp_path / folder, form, "body")


def test_files_without_rows_are_no_damage(tmp_path, reader):
    write(tmp_path, {"a.parquet": b"", "b.parquet": parquet(text=["b"])})
    assert texts(reader, tmp_path, "parquet") == ["b"]
    write(tmp_path, {"c.parquet": b"PAR1 and no more"})
    with pytest.raises(ConfigError, match=r"c.parquet: Parquet magic bytes not found"):
        texts(reader, tmp_path, "parquet")
    write(tmp_path / "d", {"a.jsonl": b"\n\n"})
    if reader == "local":
        with pytest.raises(ConfigError, match=r"d' cannot be read as json: it holds no document"):
            texts(reader, tmp_path / "d")
    else:
        assert texts(reader, tmp_path / "d") == []


def test_a_column_without_texts_is_refused_by_its_file(tmp_path, reader):
    write(tmp_path, {"a.parquet": parquet(text=["a"]), "b.parquet": parquet(text=[b"b"])})
    with pytest.raises(ConfigError, match=r"^training\..*'text' of .*b.parquet' holds binary, not"):
        texts(reader, tmp_path, "parquet")
    write(tmp_path, {"b.parquet": parquet(body=["b"])})
    with pytest.raises(ConfigError, match=r"b.parquet' has no column 'text', but body: set text_"):
        texts(reader, tmp_path, "parquet")


def test_a_stream_of_tables_reads_one_column(tmp_path):
    write(tmp_path, {"a.csv": b'text,x\n1,1\n"a\nb",2\n', "b.csv": b"x,text,y\ns,2020-01-01,1\n"})
    assert texts("stream", tmp_path) == ["1", "a\nb", "2020-01-01"]
    write(tmp_path, {"c.csv": codecs.BOM_UTF8 + b"text\nNA\nnull\n", "d.csv": b"text\ncaf\xe9\n"})
    assert texts("stream", tmp_path)[3:] == ["NA", "null", None]


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("b.csv", b'text,x\na,1\n"b,2\nc,3\n', "b.csv: line 3: unexpected end of data"),
        ("b.csv", b"text,x\na, b,1\n", "b.csv: line 2: more values than the 2 columns"),
        ("b.csv", b"body,x\na,1\n", "b.csv' has no column 'text', but body, x: set text_column"),
        ("b.tsv", b"body\tx\n", "b.tsv' has no column 'text', but body, x"),
    ],
)
def test_a_broken_table_is_named_by_file_and_line(tmp_path, name, content, line):
    write(tmp_path, {f"a{name[1:]}": b"text\na\n", name: content})
    with pytest.raises(ConfigError, match=line):
        texts("stream", tmp_path)


def test_a_broken_archive_and_parquet_are_named_by_file_and_document(tmp_path):
    for name in "12":
        (tmp_path / name).write_text(name)
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            for member in "ab":
                tar.add(tmp_path / name, f"{member}.text")
    (tmp_path / "2.tar").write_bytes((tmp_path / "2.tar").read_bytes()[:1600])
    with pytest.raises(ConfigError, match=r"2.tar: after document 0: unexpected end of data"):
        texts("stream", tmp_path)
    table, file = pa.table({"text": [str(number) for number in range(3000)]}), io.BytesIO()
    pyarrow.parquet.write_table(table, file, row_group_size=1000, use_dictionary=False)
    content, last = file.getvalue(), pyarrow.parquet.ParquetFile(file).metadata.row_group(2)
    start = last.column(0).data_page_offset
    write(tmp_path / "c", {"a.parquet": content[:start] + bytes(16) + content[start + 16 :]})
    with pytest.raises(ConfigError, match=r"a.parquet: after document 2,000: Couldn't deserialize"):
        texts("local", tmp_path / "c", "parquet")


# --- Encodings ------------------------------------------------------------------------------------


def test_a_source_without_any_text_is_refused(tmp_path, reader):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines(*[{"text": "caf\xe9"}] * 20).replace(b"\\u00e9", b"\xe9"))
    with pytest.raises(ConfigError, match=r"a.jsonl' holds bytes that are not UTF-8 .*iconv"):
        texts(reader, tmp_path)
    path.write_bytes(json_lines({"text": ""}, {"text": None}))
    with pytest.raises(ConfigError, match=r"column 'text' of .*a.jsonl' holds empty strings"):
        texts(reader, tmp_path)


def test_a_damaged_text_is_a_document_without_one(tmp_path, reader):
    write(tmp_path / "a", {"a.jsonl": b'{"text": "\\ud83d"}\n{"text": "b"}\n{"text": "\xe9"}\n'})
    assert texts(reader, tmp_path / "a") == [None, "b", None]
    raw = pa.array([b"a", b"\xe9", None], pa.binary()).view(pa.string())
    write(tmp_path / "b", {"a.parquet": parquet(text=raw)})
    assert texts(reader, tmp_path / "b", "parquet") == ["a", None, None]
    write(tmp_path / "c", {"a.txt": b"a\n\n" + b"\xe9\n"})
    found = texts(reader, tmp_path / "c", "text")
    assert [text for text in found if text != ""] == ["a", None]


def test_a_byte_order_mark_is_skipped(tmp_path, reader):
    mark = codecs.BOM_UTF8
    write(tmp_path / "a", {f"{n}.jsonl": mark + json_lines(A) + mark + json_lines(B) for n in "12"})
    assert texts(reader, tmp_path / "a") == ["a", "b"] * 2
    write(tmp_path / "b", {f"{number}.txt": mark + b"a" for number in "12"})
    assert texts(reader, tmp_path / "b", "text") == ["a", "a"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_other_encodings_of_unicode_are_read(tmp_path, reader, encoding):
    write(tmp_path / "a", {"a.jsonl": '{"text": "caf\xe9"}\n'.encode(encoding)})
    assert texts(reader, tmp_path / "a") == ["caf\xe9"]
    write(tmp_path / "b", {"a.txt.gz": gzip.compress("caf\xe9".encode(encoding))})
    assert texts(reader, tmp_path / "b", "text") == ["caf\xe9"]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("\u4e2d\u6587\n".encode("utf-16-le"), "holds NUL, as no text in UTF-8 does: convert it"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\n", "a pointer of Git LFS"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path, reader, content, line):
    write(tmp_path, {"a.txt": content})
    with pytest.raises(ConfigError, match=f"a.txt: .*{line}"):
        texts(reader, tmp_path, "text")


def test_a_broken_record_is_named_by_file_and_line(tmp_path, reader):
    write_jsonl(tmp_path / "a.jsonl", ["a"])
    write(tmp_path, {"b.jsonl": json_lines(A, B) + b'{"text": '})
    with pytest.raises((ConfigError, ValueError), match=r"b.jsonl: line 3: "):
        texts(reader, tmp_path)
    write(tmp_path / "cut", {"c.jsonl.gz": gzip.compress(json_lines(A))[:-9]})
    with pytest.raises((ConfigError, ValueError), match=r"c.jsonl.gz: Compressed file ended"):
        texts(reader, tmp_path / "cut")


def test_a_byte_order_mark_in_a_configuration_and_a_tokenizer_is_skipped(tmp_path):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "<eos>": 1}, []))
    files = {
        "run.toml": "[training]\nsteps = 3\n",
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": '{"eos_token": "<eos>"}',
    }
    write(tmp_path, {name: codecs.BOM_UTF8 + text.encode() for name, text in files.items()})
    assert load_job(["--config", str(tmp_path / "run.toml")]).training.steps == 3
    assert load_tokenizer(str(tmp_path)).eos_id == 1


@pytest.mark.slow
def test_a_first_step_without_a_loss_is_said(tmp_path):
    """One of 2,000 documents has a text, which the step does not read."""
    path = write_jsonl(tmp_path / "a.jsonl", ["a text", *[""] * 1999])
    data = {"training__dataset": "json", "training__dataset_path": path}
    run = run_train(tmp_path / "run", **data, training__seq_len=8, training__steps=1)
    assert run.returncode == 0, run.stderr
    assert "step 1: the loss is exactly 0 over 0 target tokens: nothing is learned" in run.stdout
