"""Parquet files: the same texts as pyarrow reads, and bombs refused in bounded memory."""

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from tests.support.documents import read_apart
from titan_moe.config.errors import ConfigError
from titan_moe.data import arrow_cache, file_rows, parquet
from titan_moe.data.file_corpus import FileCorpus

_WAYS = [
    {},
    {"compression": "zstd", "data_page_size": 100, "write_batch_size": 3},
    {"compression": "gzip", "data_page_version": "2.0", "row_group_size": 7},
    {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
    {"use_dictionary": False, "column_encoding": {"text": "DELTA_LENGTH_BYTE_ARRAY"}},
    {"use_dictionary": False, "compression": "none", "write_page_checksum": True},
]


def _write(path: Path, texts: Sequence[str | None], **how: object) -> Path:
    """With another column on either side of the texts."""
    numbers = list(range(len(texts)))
    column = pa.array(texts, pa.string())
    table = pa.table({"a.text": numbers, "text": column, "z": [[number] for number in numbers]})
    pyarrow.parquet.write_table(table, path, **how)
    return path


def _repeated(path: Path, text: str, times: int) -> Path:
    """One value, and its number as often as there are rows."""
    rows = pa.DictionaryArray.from_arrays(pa.array([0] * times, pa.int32()), pa.array([text]))
    pyarrow.parquet.write_table(pa.table({"text": rows}), path, store_schema=False)
    return path


def _refusal(*paths: Path) -> str:
    folder = paths[0].parent
    with pytest.raises(ConfigError) as refused:
        FileCorpus("parquet", str(folder), key="training.")
    (line,) = refused.value.lines
    prefix = f"training.dataset_path='{folder}'"
    assert line.startswith(prefix) and "\n" not in line
    return line.removeprefix(prefix)


@pytest.mark.parametrize("how", _WAYS)
def test_the_texts_are_those_of_pyarrow(tmp_path: Path, how: dict[str, object]) -> None:
    draw = random.Random(0)
    texts = [draw.choice([None, "", "\u00e9", "a" * draw.randrange(300)]) for _ in range(50)]
    path = _write(tmp_path / "a.parquet", texts, **how)
    read = [
        text for batch in parquet.read_texts(path, "text") for text in batch["text"].to_pylist()
    ]
    assert read == texts


@pytest.mark.parametrize("how", _WAYS)
def test_pages_are_as_large_as_the_footer_of_an_honest_file_says(
    tmp_path: Path, how: dict[str, object]
) -> None:
    path = _write(tmp_path / "a.parquet", [f"text {number % 9}" for number in range(50)], **how)
    metadata = pyarrow.parquet.read_metadata(path)
    with path.open("rb") as file:
        for group in range(metadata.num_row_groups):
            chunk = metadata.row_group(group).column(1)
            start = chunk.dictionary_page_offset or chunk.data_page_offset
            end = start + chunk.total_compressed_size
            unpacked, headers = sum(parquet._page_sizes(file, start, end)), 0
            at = start
            while at < end:
                file.seek(at)
                header = parquet._Header(file)
                headers += file.tell() - at
                at = file.tell() + header.compressed_size
            assert at == end
            assert unpacked + headers == chunk.total_uncompressed_size


def test_a_text_that_is_too_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "LONGEST_RECORD", 1 << 20)
    texts = ["a" * (1 << 20), "a" * ((1 << 20) + 1)]
    _write(tmp_path / "a.parquet", texts[:1])
    path = _write(tmp_path / "b.parquet", [None, *texts], compression="zstd")
    assert f"the text in row 3 of {path} is longer than 1 MiB" in _refusal(path)
    path.unlink()
    assert len(FileCorpus("parquet", str(tmp_path), key="training.")) == 1


def test_a_value_repeated_by_number_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_rows, "_ALWAYS", 1_000_000)
    monkeypatch.setattr(parquet, "_BATCH", 50_000)
    path = _repeated(tmp_path / "a.parquet", "a" * 10_000, 1_000)
    monkeypatch.setattr(file_rows, "MOST_TIMES", 10)
    assert f"{path} unpacks to more than 0.0 GiB" in _refusal(path)
    assert not list(arrow_cache._folder().glob(".tmp*"))


def test_a_page_that_is_too_large_is_refused_whatever_the_footer_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _write(tmp_path / "a.parquet", ["a" * 3_000_000], compression="zstd")
    chunk = pyarrow.parquet.read_metadata(path).row_group(0).column(1)
    honest, lie = (_zigzag(size) for size in (chunk.total_uncompressed_size, 2_500_000))
    content = path.read_bytes()
    assert len(honest) == len(lie) and content.count(honest) == 1
    path.write_bytes(content.replace(honest, lie))
    told = pyarrow.parquet.read_metadata(path).row_group(0).column(1).total_uncompressed_size
    assert told == 2_500_000
    monkeypatch.setattr(parquet, "LARGEST_PAGE", 2 << 20)
    assert f"a page of row group 1 of {path} unpacks to 2 MiB" in _refusal(path)


def test_row_groups_that_share_their_bytes_are_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.parquet", ["a" * 3_000_000])
    content, metadata = path.read_bytes(), pyarrow.parquet.read_metadata(path)
    for _ in range(5):
        metadata.append_row_groups(metadata)
    metadata.write_metadata_file(tmp_path / "footer")
    size = int.from_bytes(content[-8:-4], "little")
    path.write_bytes(content[: -8 - size] + (tmp_path / "footer").read_bytes()[4:])
    assert len(pyarrow.parquet.read_table(path)) == 32
    assert f"row group 2 of {path} lies outside the file or in another" in _refusal(path)


def test_all_pages_are_added_up_before_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_rows, "_ALWAYS", 50_000)
    monkeypatch.setattr(file_rows, "MOST_TIMES", 1)
    texts = [str(number) * 100 for number in range(1_000)]
    how = {"compression": "zstd", "data_page_size": 100, "use_dictionary": False}
    path = _write(tmp_path / "a.parquet", texts, **how)
    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", None)
    assert f"{path} unpacks to more than" in _refusal(path)


def _zigzag(value: int) -> bytes:
    """A number as Thrift's compact protocol writes it."""
    found, value = [], value << 1
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def test_damaged_page_headers_are_refused_in_a_line(tmp_path: Path) -> None:
    """Each byte of the column overwritten: refused, or read as other text."""
    whole = tmp_path / "whole"
    _write(whole, ["some text", "more"], data_page_version="2.0", compression="none")
    content, draw = whole.read_bytes(), random.Random(0)
    whole.unlink()
    chunk = pyarrow.parquet.ParquetFile(pa.BufferReader(content)).metadata.row_group(0).column(1)
    path, refused = tmp_path / "a.parquet", 0
    for at in range(chunk.dictionary_page_offset, chunk.data_page_offset + 40):
        damaged = bytearray(content)
        damaged[at] = draw.randrange(256)
        path.write_bytes(bytes(damaged))
        try:
            FileCorpus("parquet", str(path), key="training.")
        except ConfigError as error:
            refused += 1
            assert not any(word in str(error) for word in ("\n", "Error", "None")), error
    assert refused > 20


def test_other_columns_and_files_without_the_column(tmp_path: Path) -> None:
    path = tmp_path / "b.parquet"
    _write(tmp_path / "a.parquet", ["x"])
    pyarrow.parquet.write_table(pa.table({"text": [1], "body": ["x"]}), path)
    with pytest.raises(ConfigError, match=rf"that column of {path} holds int64, not text; it has"):
        FileCorpus("parquet", str(tmp_path), key="training.")
    pyarrow.parquet.write_table(pa.table({"body": ["x"]}), path)
    with pytest.raises(ConfigError, match=rf"{path} has no such column, but body"):
        FileCorpus("parquet", str(tmp_path), key="training.")


@pytest.mark.parametrize("values", [pa.string(), pa.large_string(), pa.string_view()])
def test_texts_in_a_dictionary_and_other_types_of_text(tmp_path: Path, values: pa.DataType) -> None:
    texts = ["x", "y" * 300, "x", None]
    plain = pa.array(texts, values)
    # A pandas column of categories is such a dictionary.
    for column in (plain, plain.cast(pa.large_string()).dictionary_encode()):
        pyarrow.parquet.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
        corpus = FileCorpus("parquet", str(tmp_path), key="training.", max_bad_documents=1.0)
        assert [corpus[index].content for index in range(4)] == [text or "" for text in texts]


def test_row_groups_and_files_without_rows(tmp_path: Path) -> None:
    """As jobs leave them whose parts found nothing."""
    table = pa.table({"text": ["x"]})
    with pyarrow.parquet.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        for rows in (table, table.slice(1), table):
            writer.write_table(rows)
    pyarrow.parquet.write_table(table.slice(1), tmp_path / "b.parquet")
    corpus = FileCorpus("parquet", str(tmp_path), key="training.")
    assert [corpus[index].content for index in range(len(corpus))] == ["x", "x"]
    (tmp_path / "a.parquet").unlink()
    assert _refusal(tmp_path / "b.parquet") == " holds no document"


def test_a_cache_that_cannot_be_made_is_not_blamed_on_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(arrow_cache, "_folder", lambda: tmp_path / "file/cache/tables")
    _write(tmp_path / "a.parquet", ["x"])
    with pytest.raises(ConfigError, match=r"tables, where data sets are kept .* set HF_HOME"):
        FileCorpus("parquet", str(tmp_path), key="training.")


def test_files_are_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "a.parquet", ["x", None])
    first = FileCorpus("parquet", str(tmp_path), key="training.")
    monkeypatch.setattr(arrow_cache, "_write", None)
    again = FileCorpus("parquet", str(tmp_path), key="training.")
    assert [again[index] for index in range(2)] == [first[index] for index in range(2)]
    assert again.fingerprint == first.fingerprint


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9])
def test_a_conversion_that_is_damaged_is_made_anew(tmp_path: Path, kept: float) -> None:
    """Cut between two batches too: that is no shorter data."""
    path = _write(tmp_path / "a.parquet", ["x" * 1000, None, "y"] * 1000)
    before = set(arrow_cache._folder().glob("*.arrow"))
    first = FileCorpus("parquet", str(path), key="training.")
    (cache,) = set(arrow_cache._folder().glob("*.arrow")) - before
    os.truncate(cache, int(kept * cache.stat().st_size))
    again = FileCorpus("parquet", str(path), key="training.")
    assert len(again) == len(first) and again[len(again) - 1].content == "y"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mebibytes", "rows", "said"), [(8, 2_000, "unpacks to"), (100, 9, "text")]
)
def test_a_bomb_is_refused_in_little_memory(
    tmp_path: Path, mebibytes: int, rows: int, said: str
) -> None:
    path = _repeated(tmp_path / "a.parquet", "a" * (mebibytes << 20), rows)
    line, kilobytes = read_apart("parquet", path)
    assert path.stat().st_size < 10_000_000
    assert said in line and str(path) in line
    assert kilobytes < 450_000
