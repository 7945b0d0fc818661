"""The safetensors format, against the reference implementation."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from titan_moe.checkpoint.hf import safetensors_file
from titan_moe.checkpoint.hf.pieces import runs, whole
from titan_moe.checkpoint.hf.safetensors_file import (
    as_bytes,
    make_header,
    read_box,
    read_header,
    write_all,
)
from titan_moe.runtime.errors import RunError

TENSORS = {
    "a": torch.randn(4, 6),
    "b": torch.randn(3, 5, 7).bfloat16(),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "int": torch.arange(10),
    "fp8": torch.randn(8, 8).to(torch.float8_e4m3fn),
}


def _read(path, name, box):
    entry = read_header(path)[name]
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return read_box(descriptor, entry, box)
    finally:
        os.close(descriptor)


def test_reads_what_the_reference_writes(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    assert read_header(path).keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        found = _read(path, name, whole(tensor.shape))
        assert found.dtype == tensor.dtype and torch.equal(found.float(), tensor.float())


def test_the_reference_reads_what_is_written(tmp_path):
    path = tmp_path / "model.safetensors"
    header, places, size = make_header({n: (t.dtype, tuple(t.shape)) for n, t in TENSORS.items()})
    with path.open("wb") as file:
        file.write(header)
        file.truncate(size)
    descriptor = os.open(path, os.O_WRONLY)
    for name, tensor in TENSORS.items():
        write_all(descriptor, as_bytes(tensor.contiguous()), places[name])
    os.close(descriptor)
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].float(), tensor.float())


@pytest.mark.parametrize("long_run", [1, 2**20])
@pytest.mark.parametrize(
    "box",
    [
        (slice(1, 3), slice(0, 40), slice(0, 30)),
        (slice(2, 3), slice(3, 9), slice(0, 30)),
        (slice(0, 3), slice(3, 9), slice(4, 6)),
        (slice(0, 3), slice(1, 40, 2), slice(0, 30)),
        (slice(0, 1), slice(0, 40), slice(0, 30, 2)),
        (slice(2, 3), slice(7, 8), slice(5, 6)),
        (slice(2, 2), slice(7, 8), slice(5, 6)),
    ],
)
def test_reads_boxes(tmp_path, monkeypatch, box, long_run):
    monkeypatch.setattr(safetensors_file, "_LONG_RUN", long_run)
    tensor = torch.randn(3, 40, 30)
    save_file({"x": torch.ones(3), "t": tensor}, tmp_path / "m")
    assert torch.equal(_read(tmp_path / "m", "t", box), tensor[box])


def test_reads_only_what_it_needs(tmp_path, monkeypatch):
    tensor = torch.randn(64, 1024)
    save_file({"t": tensor}, tmp_path / "m")
    read, preadv = [], os.preadv

    def counted(descriptor, buffers, at):
        read.append(sum(len(buffer) for buffer in buffers))
        return preadv(descriptor, buffers, at)

    monkeypatch.setattr(os, "preadv", counted)
    _read(tmp_path / "m", "t", (slice(8, 16), slice(0, 1024)))
    assert sum(read) == 8 * 1024 * 4
    assert len(list(runs((64, 1024), (slice(0, 64), slice(0, 512))))) == 64


@pytest.mark.parametrize("keep", [4, 20, 100, -1])
def test_truncated(tmp_path, keep):
    path = tmp_path / "m"
    save_file({"t": torch.randn(64)}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(RunError, match=r"m is (truncated|damaged)"):
        read_header(path)


def test_a_file_that_ends_early_while_it_is_read(tmp_path):
    path = tmp_path / "m"
    save_file({"t": torch.randn(64, 1024)}, path)
    entry = read_header(path)["t"]
    with path.open("r+b") as file:
        file.truncate(50_000)
        with pytest.raises(RunError, match="m is truncated: it ends at byte 50000"):
            read_box(file.fileno(), entry, whole((64, 1024)))


def test_offsets_that_lie(tmp_path):
    path = tmp_path / "m"
    save_file({"t": torch.randn(64)}, path)
    path.write_bytes(path.read_bytes().replace(b"[0,256]", b"[0,128]"))
    with pytest.raises(RunError, match="damaged"):
        read_header(path)


def test_missing(tmp_path):
    with pytest.raises(RunError, match="is missing"):
        read_header(tmp_path / "none")
