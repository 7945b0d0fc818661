"""Ways in which a folder of files is not what was written."""

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MARKER = "a-pickle-ran"
"""The file that hostile pickles make, in the folder above the damaged one."""
_OUTSIDE = "../../../../etc/passwd"
_ODD_VALUES: list[Any] = [
    *(None, True, -1, 0, 2**63, 1e308, float("nan"), "", "x", "/etc/passwd", "\x00", "a\nb"),
    *(3000 * "a", [], {}, [_OUTSIDE], _OUTSIDE),
]


def damage(folder: Path, random_: random.Random) -> str:
    """Does one thing to a file of the folder; returns what."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    while True:
        path = random_.choice(files)
        done = random_.choice(_DAMAGES)(path, files, random_)
        if done is not None:
            return f"{path.relative_to(folder)}: {done}"


def _replace(path: Path, content: bytes) -> None:
    """Writes a new file: the folder may share its files with the undamaged one."""
    path.unlink()
    path.write_bytes(content)


def _cut(path: Path, files: list[Path], random_: random.Random) -> str:
    size = random_.randrange(path.stat().st_size + 1)
    _replace(path, path.read_bytes()[:size])
    return f"cut to {size} bytes"


def _flip(path: Path, files: list[Path], random_: random.Random) -> str | None:
    content = bytearray(path.read_bytes())
    if not content:
        return None
    at = random_.randrange(len(content))
    content[at] ^= 1 << random_.randrange(8)
    _replace(path, bytes(content))
    return f"a bit of byte {at} flipped"


def _append(path: Path, files: list[Path], random_: random.Random) -> str:
    _replace(path, path.read_bytes() + random_.randbytes(100))
    return "100 bytes more"


def _remove(path: Path, files: list[Path], random_: random.Random) -> str:
    path.unlink()
    return "removed"


def _copy_over(path: Path, files: list[Path], random_: random.Random) -> str | None:
    other = random_.choice([each for each in files if each.suffix == path.suffix])
    if other == path:
        return None
    _replace(path, other.read_bytes())
    return f"holds {other.name}"


def _link(path: Path, files: list[Path], random_: random.Random) -> str:
    path.unlink()
    path.symlink_to("/etc/passwd")
    return "a link to /etc/passwd"


def _hostile_pickle(path: Path, files: list[Path], random_: random.Random) -> str | None:
    if path.suffix in (".json", ".toml"):
        return None
    _replace(path, pickle.dumps(_Hostile(path.parents[1] / MARKER)))
    return "a pickle that runs a program"


class _Hostile:
    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self._marker}",)


def _other_json(path: Path, files: list[Path], random_: random.Random) -> str | None:
    """Puts another value at a random place of a JSON file."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        return None
    if not (found := list(_places(value))):
        return None
    inside, key = random_.choice(found)
    inside[key] = odd = random_.choice(_ODD_VALUES)
    _replace(path, json.dumps(value).encode())
    return f"{key!r} is {str(odd)[:40]}"


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields all places of a JSON value, the outer ones first."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield value, key
        yield from _places(value[key])


_DAMAGES = (
    *(_cut, _flip, _flip, _append, _remove, _copy_over, _link, _hostile_pickle),
    *(_other_json, _other_json, _other_json),
)


def copy_linked(source: Path, target: Path) -> None:
    """Makes a copy that shares the files' bytes; `damage` never writes into them."""
    shutil.copytree(source, target, copy_function=os.link)
