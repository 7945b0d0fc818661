"""Compressed files that expand to a record without an end are refused, in bounded memory."""

import gzip
import io
import random
import re
from pathlib import Path

import pytest
import zstandard

from tests.support.documents import read_apart
from titan_moe.data import file_rows
from titan_moe.data.file_rows import opened, overlong_record

_MIB = 2**20


def _bomb(path: Path, begin: bytes, endless: bytes) -> Path:
    """`begin`, then 200 MiB; members and frames of these formats may follow one another."""
    compress = gzip.compress if path.suffix == ".gz" else zstandard.compress
    path.write_bytes(compress(begin) + 200 * compress(endless * (_MIB // len(endless))))
    assert path.stat().st_size < 500_000
    return path


@pytest.mark.parametrize(
    ("name", "begin", "endless", "begins"),
    [
        ("a.jsonl.gz", b'{"text": "x"}\n{"text": "', b"a", "the record that begins in line 2 of "),
        ("a.jsonl.zst", b'{"text": "', b"a", "the record that begins in line 1 of "),
        ("a.json.gz", b"[", b'{"text": "x"},\n ', "the record that begins in line 1 of "),
        ("a.txt.gz", b"a\n\n", b"a line\n ", "the paragraph that begins in line 3 of "),
    ],
)
def test_a_bomb_is_refused_in_little_memory(
    tmp_path: Path, name: str, begin: bytes, endless: bytes, begins: str
) -> None:
    path = _bomb(tmp_path / name, begin, endless)
    dataset = "text" if ".txt" in name else "json"
    said, kilobytes = read_apart(dataset, path)
    assert said.startswith(f"training.dataset_path='{path}': {begins}{path} is longer than 64 MiB")
    assert kilobytes < 60_000


def _slowly(content: bytes, separator: bytes, most: int) -> int:
    """The line that a record longer than `most` begins in, or 0."""
    content, at = content.replace(b"\r", b""), 0
    for number, record in enumerate(re.split(b"(" + separator + b"+)", content)):
        if number % 2 == 0 and len(record) > most:  # Separators are between them.
            return content.count(b"\n", 0, at) + 1
        at += len(record)
    return 0


@pytest.mark.parametrize("dataset", ["json", "text"])
def test_records_are_measured_across_blocks(dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_rows, "LONGEST_RECORD", 6)
    monkeypatch.setattr(file_rows, "_BLOCK", 3)
    draw, found = random.Random(0), 0
    for _ in range(1000):
        content = bytes(draw.choices(b"ab\n\r", (6, 6, 5, 1), k=draw.randrange(40)))
        if dataset == "json":
            content = b"{}\n" + content
        separator = b"\n" if dataset == "json" else b"\n\n"
        line = file_rows._overlong(io.BytesIO(content), dataset)
        assert line == _slowly(content, separator, 6), content
        found += line > 0
    assert 100 < found < 900


def test_plain_and_damaged_files_are_left_to_whoever_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_rows, "LONGEST_RECORD", 10)
    record = b'{"text": "as long as you like"}\n'
    (tmp_path / "a.json").write_bytes(record)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(b"{}\n" * 9)[:-9])
    (tmp_path / "c.json.zst").write_bytes(b"no zstd")
    files = sorted(tmp_path.iterdir())
    assert overlong_record("json", files) == ""
    (tmp_path / "d.json.gz").write_bytes(gzip.compress(record))
    assert "line 1 of" in overlong_record("json", [*files, tmp_path / "d.json.gz"])


def test_every_frame_of_zstd_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.zst"
    path.write_bytes(zstandard.compress(b"a\n") + zstandard.compress(b"b\n"))
    with opened(path) as file:
        assert list(file) == [b"a\n", b"b\n"]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_file_may_not_unpack_to_a_thousand_times_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    compress = gzip.compress if ending == ".gz" else zstandard.compress
    path = tmp_path / f"a.json{ending}"
    path.write_bytes(compress(b'{"text": "x"}\n' * 100_000))
    assert overlong_record("json", [path]) == ""
    monkeypatch.setattr(file_rows, "_ALWAYS", 1_000_000)
    monkeypatch.setattr(file_rows, "MOST_TIMES", 10)
    assert overlong_record("json", [path]).startswith(f"{path} unpacks to more than 0.0 GiB")
    monkeypatch.setattr(file_rows, "_ALWAYS", 1_400_000)
    assert overlong_record("json", [path]) == ""
