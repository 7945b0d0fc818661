"""What notices that files have changed: their sizes, and a sampled checksum of their content."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from titan_moe.data.documents import mix
from titan_moe.runtime.errors import RunError

# Read whole up to this many bytes in all; of more, this many. About 0.1 s from a local disk.
SAMPLED = 64 << 20
_BLOCK = 128 << 10


def sampled_checksum(files: Sequence[Path]) -> str:
    """CRC32 of the files' bytes one after the other: of all, or of blocks of a larger set.

    The blocks are the first, the last, and one at a place of its own in each of 512 equal parts
    between. So a change of one byte shows for certain in sets of up to 64 MiB, and in larger ones
    any change of consecutive bytes that are 1/256 of the set.
    """
    sizes = [path.stat().st_size for path in files]
    found = 0
    for path, start, length in _pieces(files, sizes):
        with path.open("rb") as file:
            file.seek(start)
            while length > 0 and (block := file.read(min(length, 1 << 20))):
                found = zlib.crc32(block, found)
                length -= len(block)
    return f"{found:08x}"


def check_sizes(sizes: Mapping[Path, int]) -> None:
    """RunError where a file has not the size that it had, in bytes. One that was removed while it
    was open has been read to its end."""
    for path, size in sizes.items():
        found = size
        with suppress(FileNotFoundError):
            found = path.stat().st_size
        if found != size:
            raise RunError(
                f"the data's files have changed since the run began: {path} had {size:,} bytes and "
                f"has {found:,}: put the old file back and start the same command again"
            )


def _pieces(files: Sequence[Path], sizes: Sequence[int]) -> Iterator[tuple[Path, int, int]]:
    """File, first byte and number of bytes of each piece to read."""
    blocks = iter(_blocks(sum(sizes)))
    start, end = next(blocks)
    before = 0
    for path, size in zip(files, sizes, strict=True):
        while start < before + size:
            first, last = max(start, before), min(end, before + size)
            yield path, first - before, last - first
            if last < end:
                break  # The block goes on in the next file.
            start, end = next(blocks, (sum(sizes), sum(sizes)))
        before += size


def _blocks(total: int) -> list[tuple[int, int]]:
    """First byte and end of each block, ascending."""
    count = SAMPLED // _BLOCK
    if total <= SAMPLED:
        return [(0, total)]
    starts = [0, total - _BLOCK]
    for number in range(count):
        low, high = (at * total // count for at in (number, number + 1))
        starts.append(low + mix(total, number) % (high - low - _BLOCK + 1))
    return [(start, start + _BLOCK) for start in sorted(starts)]
