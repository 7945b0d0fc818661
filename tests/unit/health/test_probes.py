"""What one rank checks alone, on a CPU that is wrong as planted."""

import errno
import os
from pathlib import Path

import pytest
import torch

from titan_moe.health import probes
from titan_moe.health.probes import Operations, disk, matmul, memory

_CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(probes._MATMUL_S, "cpu", 0.0)
    monkeypatch.setattr(probes, "_DISK_BYTES", 1 << 20)
    monkeypatch.setattr(probes, "_CHUNK", 1 << 12)


def test_a_device_in_order_has_rates_and_no_problem(tmp_path: Path) -> None:
    for result in (
        matmul(_CPU, Operations()),
        memory(_CPU, Operations(), 1 << 20),
        disk(tmp_path, 0, Operations()),
    ):
        assert not result.problem and result.rates
        assert all(rate > 0 for rate in result.rates.values())
    assert not list(tmp_path.iterdir())


def test_sums_are_exact_in_whatever_order() -> None:
    """On a GPU they have 2,048 addends."""
    generator = torch.Generator().manual_seed(0)
    left = torch.randint(-probes._LARGEST, probes._LARGEST, (512, 2048), generator=generator)
    right = torch.randint(-probes._LARGEST, probes._LARGEST, (2048, 512), generator=generator)
    assert (left.double().abs() @ right.double().abs()).max() < 2**24
    assert torch.equal(left.bfloat16().long(), left)


def test_one_wrong_bit_of_a_product_is_seen() -> None:
    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = torch.mm(a, b)
        product.view(torch.int32)[511, 1023] ^= 1
        return product

    said = matmul(_CPU, Operations(multiply=multiply)).problem
    assert said == "5 of 2,621,440 elements of 5 products are wrong"


@pytest.mark.parametrize("word", [0, 7000, (1 << 17) - 1])
@pytest.mark.parametrize("stuck", [0, -1])
def test_a_bit_that_is_stuck_is_seen_in_any_word(word: int, stuck: int) -> None:
    start = iter(range(0, 1 << 40, probes._CHUNK))

    def read(words: torch.Tensor) -> torch.Tensor:
        at = word - next(start) % (1 << 17)
        if 0 <= at < len(words):
            words[at] = (words[at] & ~(1 << 33)) | (stuck & 1 << 33)
        return words

    said = memory(_CPU, Operations(read=read), 1 << 20).problem
    words = "1 of 262,144 words were read back with other bits"
    assert said == f"{words}; the first: word {word}, bits 0x200000000"


def test_words_that_answer_for_others_are_seen() -> None:
    """A line of the address that is stuck: the second half of the chunks is the first."""
    chunks: list[torch.Tensor] = []

    def read(words: torch.Tensor) -> torch.Tensor:
        chunks.append(words)
        return chunks[(len(chunks) - 1) % 16]

    said = memory(_CPU, Operations(read=read), 1 << 20).problem
    assert said.startswith("131,072 of 262,144 words were read back with other bits")


def test_a_file_that_comes_back_otherwise_is_seen(tmp_path: Path) -> None:
    said = disk(tmp_path, 3, Operations(read_file=lambda path: path.read_bytes()[:-1] + b"?"))
    assert said.problem == f"a file in {tmp_path} was read back with other bytes"


def test_a_disk_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "file").touch()
    assert disk(file, 0, Operations()).problem == f"cannot write and read in {file}: File exists"

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    said = disk(tmp_path, 0, Operations()).problem
    assert said == f"cannot write and read in {tmp_path}: No space left on device"
    assert list(tmp_path.iterdir()) == [file]


def test_a_check_of_no_memory_is_a_problem() -> None:
    result = memory(_CPU, Operations(), 8)
    assert result.problem == "8 bytes are too few to test" and not result.rates
