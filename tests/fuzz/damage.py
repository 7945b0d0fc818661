"""Ways in which a folder of files is not what was written."""

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARKER = "a-pickle-ran"
"""The file that hostile pickles make, in the folder above the damaged one."""
_OUTSIDE = "../../../../etc/passwd"


def damage(folder: Path, random_: random.Random) -> str:
    """Do one thing to a folder; says what."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    while True:
        path = random_.choice(files)
        done = random_.choice(_DAMAGES)(path, files, random_)
        if done is not None:
            return f"{path.relative_to(folder)}: {done}"


def _replace(path: Path, content: bytes) -> None:
    """With a file of its own: the folder may share files with the undamaged one."""
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


def _scribble(path: Path, files: list[Path], random_: random.Random) -> str:
    content = bytearray(path.read_bytes())
    at = random_.randrange(len(content) + 1)
    content[at : at + 64] = random_.randbytes(64)
    _replace(path, bytes(content))
    return f"64 bytes from {at} on overwritten"


def _append(path: Path, files: list[Path], random_: random.Random) -> str:
    _replace(path, path.read_bytes() + random_.randbytes(100))
    return "100 bytes more"


def _remove(path: Path, files: list[Path], random_: random.Random) -> str:
    path.unlink()
    return "removed"


def _rename(path: Path, files: list[Path], random_: random.Random) -> str:
    path.rename(path.with_name(f"x{path.name}"))
    return "renamed"


def _exchange(path: Path, files: list[Path], random_: random.Random) -> str | None:
    """As files of two ranks may be."""
    others = [other for other in files if other.suffix == path.suffix and other != path]
    if not others:
        return None
    other, aside = random_.choice(others), path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)
    return f"exchanged with {other.name}"


def _copy_over(path: Path, files: list[Path], random_: random.Random) -> str | None:
    other = random_.choice(files)
    if other == path:
        return None
    _replace(path, other.read_bytes())
    return f"holds {other.name}"


def _folder(path: Path, files: list[Path], random_: random.Random) -> str:
    path.unlink()
    path.mkdir()
    return "a folder"


def _link(path: Path, files: list[Path], random_: random.Random) -> str:
    path.unlink()
    target = random_.choice(["/etc/passwd", str(path), "nowhere"])
    path.symlink_to(target)
    return f"a link to {target}"


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
    """Another value at a random place of a JSON file."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    found = list(places(value))
    if not found:
        return None
    inside, key = random_.choice(found)
    odd = random_.choice(ODD_VALUES)
    inside[key] = odd
    text = json.dumps(value).replace(json.dumps(_NESTED), 5000 * "[" + 5000 * "]")
    _replace(path, text.encode())
    return f"{key!r} is {str(odd)[:40]}"


_NESTED = "5,000 lists in one another"
ODD_VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 2**63, 10**30, 1e308, float("nan"), float("-inf")),
    *("", "x", _OUTSIDE, "/etc/passwd", "\x00", "a\nb", 3000 * "a", [], {}, [_OUTSIDE], _NESTED),
]


def places(value: Any) -> Any:
    """All places of a JSON value, the outer ones first."""
    pairs: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list):
        pairs = list(enumerate(value[:50]))
    for key, inner in pairs:
        yield value, key
        yield from places(inner)


_DAMAGES = (
    *(_cut, _flip, _flip, _scribble, _append, _remove, _rename, _exchange, _copy_over, _folder),
    *(_link, _hostile_pickle, _other_json, _other_json, _other_json),
)


def copy_linked(source: Path, target: Path) -> None:
    """A copy that shares the files' bytes; `damage` replaces files and never writes into them."""
    shutil.copytree(source, target, copy_function=os.link)
