"""The configurations that come with titan_moe, found by name wherever it is installed."""

from difflib import get_close_matches
from os import fsencode
from os.path import exists, expanduser
from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
"""Inside the package: in a checkout a link to configs/, in an installed package a copy of it."""


def as_path(text: str) -> str:
    """Returns a path whose ~ is the home folder. Raises ValueError where no file can have it."""
    size, longest = len(fsencode(text)), max(len(fsencode(name)) for name in text.split("/"))
    if "\0" in text or not len(text.encode(errors="ignore")) == size <= 4095 or longest > 255:
        raise ValueError("must be a path: UTF-8, no NUL, names of at most 255 bytes, 4095 in all")
    if (path := expanduser(text)).startswith("~"):
        raise ValueError("there is no such user: write the path out, or ./~ for a name")
    return path


def find_config(text: str) -> str:
    """Returns the path of a file, or that of the configuration of this name: qwen3/debugmodel_moe,
    debug/default or default, with or without .toml, and as configs/... too.

    A text that is neither is returned as it is, ~ aside, which is the home folder.
    """
    text = expanduser(text)
    if exists(text):  # A text may be longer than a path.
        return text
    named = _named()
    name = text.removeprefix("configs/").removesuffix(".toml")
    found = [named[name]] if name in named else [named[each] for each in _with_stem(name)]
    return str(found[0]) if len(found) == 1 else text


def what_is_there(text: str) -> str:
    """Returns the end of an error about a missing file: names that are nearly the same."""
    named = _named()
    name = text.removeprefix("configs/").removesuffix(".toml")
    near = _with_stem(name) or get_close_matches(name, named)
    if near:
        return f"; did you mean {' or '.join(sorted(near))}, which titan_moe brings along?"
    return ", nor does titan_moe bring a configuration of this name along"


def _named() -> dict[str, Path]:
    """Returns the file of each training that comes with titan_moe, by its path without .toml."""
    files = sorted(path for path in CONFIGS.glob("*/*.toml") if path.parent.name != "suites")
    return {path.relative_to(CONFIGS).with_suffix("").as_posix(): path for path in files}


def _with_stem(stem: str) -> list[str]:
    return [name for name in _named() if name.rpartition("/")[2] == stem]
