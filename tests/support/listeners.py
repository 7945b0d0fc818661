"""The addresses on which processes listen, from Linux' tables."""

import os
import struct
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

_LISTENS = "0A"
_WORD = 8  # Hexadecimal digits; an address is words in the machine's byte order.


def descendants(pid: int) -> list[int]:
    """A process and all that it has started, and those."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def listening(pids: Iterable[int]) -> set[tuple[int, IPv4Address | IPv6Address, int]]:
    """Process, address and port of every TCP socket on which one of `pids` listens."""
    table = _table()
    found = set()
    for pid in pids:
        for handle in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inode = os.readlink(handle).removeprefix("socket:[").removesuffix("]")
            except OSError:  # It has ended.
                continue
            if inode in table:
                found.add((pid, *table[inode]))
    return found


def _table() -> dict[str, tuple[IPv4Address | IPv6Address, int]]:
    """Address and port by the number of a listening socket."""
    found = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            local, state, inode = fields[1], fields[3], fields[9]
            if state == _LISTENS:
                address, _, port = local.partition(":")
                found[inode] = _address(address), int(port, 16)
    return found


def _address(digits: str) -> IPv4Address | IPv6Address:
    starts = range(0, len(digits), _WORD)
    words = [int(digits[at : at + _WORD], 16) for at in starts]
    found = ip_address(struct.pack(f"={len(words)}I", *words))
    return getattr(found, "ipv4_mapped", None) or found
