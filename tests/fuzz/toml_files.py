"""Configurations with mistakes in them."""

import random
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.apart import Outcome
from tests.fuzz.verdict import refused
from titan_moe.config.errors import ConfigError
from titan_moe.train import prepare

_CONFIGS = Path(__file__).resolve().parents[2] / "configs"
_VALUES = [
    *("-1", "0", "1", "2", "3", "7", "64", "1e9", "-0.5", "nan", "inf", "1e400", str(2**63)),
    *("10" + 400 * "0", "true", '""', '"x"', '"none"', '"../../etc/passwd"', "[]", "{}", "[1, 2]"),
    *('[["x"]]', "{ x = 1 }", '"' + 5000 * "a" + '"', "1979-05-27", 300 * "[" + 300 * "]"),
    *('"\\u0000"', '"a\\nb"', "'''\nx\n'''"),
]


def broken(random_: random.Random) -> tuple[bytes, str]:
    """A configuration of the project with one to three mistakes, and where they are."""
    path = random_.choice(sorted(_CONFIGS.rglob("*.toml")))
    content, made = path.read_bytes(), []
    for _ in range(random_.choice((1, 1, 1, 2, 3))):
        mistake = random_.choice(_MISTAKES)
        content = mistake(content, random_)
        made.append(mistake.__name__)
    return content, f"{path.relative_to(_CONFIGS)}: {', '.join(made)}"


def trial(content: bytes) -> Callable[[Path], Outcome]:
    """Check the configuration as every run does before it starts."""

    def check(folder: Path) -> Outcome:
        path = folder / "config.toml"
        path.write_bytes(content)
        try:
            prepare(["--job.config_file", str(path)], 8, {})
        except ConfigError as error:
            return refused(error.lines)
        return Outcome("read", "")

    return check


def other_value(content: bytes, random_: random.Random) -> bytes:
    return _at_a_key(content, random_, lambda key, _: f"{key} = {random_.choice(_VALUES)}")


def misspelt_key(content: bytes, random_: random.Random) -> bytes:
    def misspell(key: str, value: str) -> str:
        at = random_.randrange(len(key) + 1)
        return f"{key[:at]}{random_.choice('xq._-')}{key[at:]} = {value}"

    return _at_a_key(content, random_, misspell)


def repeated_key(content: bytes, random_: random.Random) -> bytes:
    return _at_a_key(content, random_, lambda key, value: f"{key} = {value}\n{key} = {value}")


def foreign_key(content: bytes, random_: random.Random) -> bytes:
    return _at_a_key(
        content, random_, lambda key, value: f"{key} = {value}\nsomething = {random_.random()}"
    )


def missing_line(content: bytes, random_: random.Random) -> bytes:
    lines = content.split(b"\n")
    del lines[random_.randrange(len(lines))]
    return b"\n".join(lines)


def exchanged_lines(content: bytes, random_: random.Random) -> bytes:
    lines = content.split(b"\n")
    one, other = random_.randrange(len(lines)), random_.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return b"\n".join(lines)


def cut_off(content: bytes, random_: random.Random) -> bytes:
    return content[: random_.randrange(len(content) + 1)]


def flipped_bit(content: bytes, random_: random.Random) -> bytes:
    changed = bytearray(content or b" ")
    changed[random_.randrange(len(changed))] ^= 1 << random_.randrange(8)
    return bytes(changed)


def foreign_bytes(content: bytes, random_: random.Random) -> bytes:
    at = random_.randrange(len(content) + 1)
    return content[:at] + random_.randbytes(random_.randrange(1, 20)) + content[at:]


def _at_a_key(content: bytes, random_: random.Random, change: Callable[[str, str], str]) -> bytes:
    """Another line in place of one that sets a key, if there is one."""
    lines = content.decode("utf-8", "surrogateescape").split("\n")
    keyed = [n for n, line in enumerate(lines) if "=" in line and not line.startswith("#")]
    if keyed:
        number = random_.choice(keyed)
        key, value = lines[number].split("=", 1)
        lines[number] = change(key.strip(), value.strip())
    return "\n".join(lines).encode("utf-8", "surrogateescape")


_MISTAKES = (
    *(other_value, other_value, other_value, misspelt_key, repeated_key, foreign_key),
    *(missing_line, exchanged_lines, cut_off, flipped_bit, foreign_bytes),
)
