"""The addresses on which processes listen, from Linux' tables."""

import os
import struct
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

_LISTENS = "0A"


def listening(pids: list[int]) -> list[IPv4Address | IPv6Address]:
    """Returns the address of every TCP socket on which one of `pids` listens."""
    inodes = set()
    for pid in pids:
        for handle in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes.add(os.readlink(handle).removeprefix("socket:[").removesuffix("]"))
            except OSError:  # The process has ended.
                continue
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return [_address(row[1]) for row in rows if row[3] == _LISTENS and row[9] in inodes]


def _address(text: str) -> IPv4Address | IPv6Address:
    """Reads hexadecimal 32-bit words in the machine's byte order, and a port."""
    digits = text.partition(":")[0]
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    address = ip_address(struct.pack(f"={len(words)}I", *words))
    return getattr(address, "ipv4_mapped", None) or address
