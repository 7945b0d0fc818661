"""Reads a TOML file and a command line into one frozen JobConfig, and writes it as TOML.

Both are read as dotted keys with values. They are validated apart, so that a TOML string where a
number belongs is an error although every value of a command line arrives as text, and so that each
mistake can say where it stands.
"""

import json
import sys
import textwrap
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import (
    DATASETS_WITHOUT_PATH,
    DEGREES,
    READ,
    AxisOptions,
    JobConfig,
    Section,
)
from titan_moe.config.named import find_config, what_is_there
from titan_moe.config.plugins import import_modules
from titan_moe.config.torchtitan import translate
from titan_moe.runtime.files import write_whole

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_CONFIG_FILE = "job.config_file"
_FILE_FLAGS = ("config", _CONFIG_FILE)
_COMMAND_LINE = "command line"
_AXES = "comm.axes."  # Begins keys whose middle names a mesh axis.
_VARIABLES = "training.messages.template_kwargs."  # Begins keys that end as a template has them.
_LONGEST_SHOWN = 120  # Characters of a value in a message.


def load_job(argv: list[str]) -> JobConfig:
    """Reads `--config FILE`, puts the `--table.key value` overrides on top, and validates.

    FILE is a path or a name that `config.named` knows; without one every key has its default.
    `--help` prints all keys, or those of the table named behind it, and exits. Raises ConfigError
    with everything that is wrong in file and command line together.
    """
    return read_job(argv)[0]


def read_job(argv: list[str]) -> tuple[JobConfig, list[str]]:
    """Does what `load_job` does, and returns a note for each key that is read in another way."""
    if {"-h", "--help"} & set(argv):
        print(help_of_keys(table_of_help(argv)))
        raise SystemExit(0)
    path, given, problems = _read_command_line(argv)
    written: dict[str, Any] = {}
    if path is not None:
        try:
            written = flat_keys(_read_toml(Path(path)))
        except ConfigError as error:
            problems += error.lines
    imports = given.get("job.imports", written.get("job.imports"))
    problems += import_modules(map(str, imports if isinstance(imports, list) else ()))
    from_file, notes = _checked(written, path or "", problems, strict=True)
    from_cli, more = _checked(given, _COMMAND_LINE, problems)
    if problems:
        raise ConfigError(problems)
    if from_cli.get("training.dataset") in DATASETS_WITHOUT_PATH:  # Replaces the file's data.
        for key in ("training.dataset_path", "training.blend"):
            from_file.pop(key, None)
    if from_cli.get("validation.dataset") in DATASETS_WITHOUT_PATH:
        from_file.pop("validation.dataset_path", None)
    return JobConfig.model_validate(nested(from_file | from_cli)), list(dict.fromkeys(notes + more))


def resolve(job: JobConfig, world_size: int) -> JobConfig:
    """Pins global_batch_size, of which the data order is a function. `job` has passed
    `checks.job.check`."""
    if job.training.global_batch_size != -1:
        return job
    data_ranks = job.parallelism.data_ranks(world_size)
    assert data_ranks is not None
    sequences = job.training.local_batch_size * data_ranks
    return job.with_values(training={"global_batch_size": sequences})


def save_job(job: JobConfig, path: Path) -> None:
    """Writes `job` as TOML; loading that file gives an equal config."""
    write_whole(path, as_toml(job))


def as_toml(job: JobConfig, *, only_set: bool = False) -> str:
    """Returns `job` as TOML text. None becomes an absent key. `only_set`: leaves out keys that have
    their default."""
    import tomli_w

    tables = job.model_dump(exclude_none=True, exclude_defaults=only_set)
    if not job.stages:  # TOML refuses [[stages]] beside an empty list.
        tables.pop("stages", None)
    return tomli_w.dumps(tables)


def known_keys(section: type[Section] = JobConfig, prefix: str = "") -> dict[str, FieldInfo]:
    """Returns every dotted key below `section` and its field."""
    keys: dict[str, FieldInfo] = {}
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            keys |= known_keys(kind, f"{prefix}{name}.")
        else:
            keys[prefix + name] = field
    return keys


def keys_that_read() -> list[str]:
    """Returns the dotted keys that name what a training reads, but for those of lists of tables."""
    marks = {
        key: (*field.metadata, *(mark for kind in _kinds(field) for mark in get_args(kind)))
        for key, field in known_keys().items()
    }
    return [key for key, each in marks.items() if READ in each]


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns dotted keys as tables in tables."""
    tables: dict[str, Any] = {}
    for key, value in keys.items():
        *path, name = key.split(".")
        table = tables
        for each in path:
            table = table.setdefault(each, {})
        table[name] = value
    return tables


def flat_keys(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values in tables in tables by their dotted keys; tables without keys give none.

    The reverse of `nested`.
    """
    keys: dict[str, Any] = {}
    for name, value in tables.items():
        inside = isinstance(value, dict)
        keys |= flat_keys(value, f"{prefix}{name}.") if inside else {f"{prefix}{name}": value}
    return keys


def table_of_help(argv: list[str]) -> str | None:
    """Returns the word behind --help."""
    words = (word for flag, word in pairwise(argv) if flag in ("-h", "--help") and word[0:1] != "-")
    return next(words, None)


def help_of_keys(table: str | None) -> str:
    """Returns the help of all keys, or of those in `table` and below."""
    groups: dict[str, list[str]] = {}
    for key, field in known_keys().items():
        default = json.dumps(field.get_default(call_default_factory=True), default=str)
        choices = "{" + ",".join(map(str, _choices(field))) + "}" if _choices(field) else "VALUE"
        says = f"{' '.join((field.description or '').split())} (default: {default})"
        indent = 8 * " "
        wrapped = textwrap.fill(says, 98, initial_indent=indent, subsequent_indent=indent)
        groups.setdefault(key.rpartition(".")[0], []).append(f"  --{key} {choices}\n{wrapped}")
    chosen = [name for name in groups if table in (None, name) or name.startswith(f"{table}.")]
    if not chosen:
        names = ", ".join(filter(None, groups))
        raise ConfigError(f"--help {table}: no such table: choose from {names}")
    return "\n\n".join("\n".join([f"{name} options:", *groups[name]]) for name in chosen)


def _choices(field: FieldInfo) -> tuple[Any, ...]:
    """Returns the values that a key may have, if they are named one by one."""
    return next((get_args(each) for each in _kinds(field) if get_origin(each) is Literal), ())


def _kinds(field: FieldInfo) -> tuple[Any, ...]:
    kind = field.annotation
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        return values
    except FileNotFoundError as error:
        problem = f"cannot be read: {error.strerror}{what_is_there(str(path))}"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        problem = "is not UTF-8 text"
    except (ValueError, RecursionError) as error:  # A number may have too many digits.
        problem = f"is not valid TOML: {error}"
    raise ConfigError(f"{_CONFIG_FILE} = {path}: {problem}")


def _read_command_line(argv: list[str]) -> tuple[str | None, dict[str, Any], list[str]]:
    """Returns the path of a file, the overrides by their dotted keys, and what is wrong."""
    path, given, problems, known = None, {}, [], known_keys()
    while argv:
        word, *argv = argv
        if not word.startswith("--"):
            problems.append(f"{_COMMAND_LINE}: {word!r} belongs to no --table.key")
            continue
        key, equals, text = word[2:].partition("=")
        field = known.get(key)
        if not equals and argv and not argv[0].startswith("--"):
            text, *argv = argv
        elif not equals and (field.annotation is bool if field else key not in _FILE_FLAGS):
            text = "true"
        elif not equals:
            problems.append(f"{_COMMAND_LINE}: --{key}: expected one argument")
            continue
        if key in _FILE_FLAGS:
            path = find_config(text)
        else:
            given[key] = text if field is None else _value(field, text)
    return path, given, problems


def _value(field: FieldInfo, text: str) -> Any:
    """Returns the text of a command line as a value; pydantic converts numbers and booleans."""
    if text == "null":
        return None
    choices = {str(choice): choice for choice in _choices(field)}
    if text in choices or not any(get_origin(kind) is list for kind in _kinds(field)):
        return choices.get(text, text)
    if not text.startswith("["):
        return [word.strip() for word in text.split(",")] if text else []
    try:
        return json.loads(text)
    except ValueError:
        return text


def _checked(
    keys: dict[str, Any], source: str, problems: list[str], *, strict: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Returns the keys of one source that are read, and notes; adds its mistakes to `problems`."""
    kept, notes, refused = translate(keys)
    known = known_keys()
    lines = [_line(key, keys[key], source, remedy) for key, remedy in refused.items()]
    unknown = [key for key in kept if key not in known and not key.startswith((_AXES, _VARIABLES))]
    wrong = {key: kept.pop(key) for key in unknown}
    for table in ("stages", "training.blend"):
        if inside := {key: wrong.pop(key) for key in list(wrong) if key.startswith(f"{table}.")}:
            remedy = f"is a list of tables: write [[{table}]], not [{table}]"
            lines.append(f"{', '.join(inside)} ({source}): {table} {remedy}")
    lines += [_line(key, value, source, _unknown(key, known)) for key, value in wrong.items()]
    try:
        JobConfig.model_validate(nested(kept), strict=strict)
    except ValidationError as error:
        lines += [mistake(each, source, known) for each in error.errors()]
    problems += lines
    return kept, notes


def mistake(error: Mapping[str, Any], source: str, known: Iterable[str]) -> str:
    """Returns the line for one of pydantic's errors in `source`, which may have the known keys."""
    key = ".".join(str(name) for name in error["loc"] if name != "[key]")
    message = error["msg"]
    if error["type"] == "missing":
        return f"{key} ({source}): is required"
    if error["type"] == "extra_forbidden":
        message = _unknown(key, known)
    if error["type"] in ("dict_type", "model_type"):  # pydantic names a class.
        message = "must be a table"
    message = message.replace("Input should be", "must be").removeprefix("Value error, ")
    return _line(key, error["input"], source, message)


def _line(key: str, value: Any, source: str, message: str) -> str:
    text = json.dumps(value, default=str)
    half = _LONGEST_SHOWN // 2
    shown = text if len(text) <= _LONGEST_SHOWN else f"{text[:half]} … {text[-half:]}"
    return f"{key} = {shown} ({source}): {message}"


def _unknown(key: str, known: Iterable[str]) -> str:
    """Returns what to say about a key that does not exist; names the nearest one."""
    if any(each.startswith(f"{key}.") for each in known):
        return f"must be a table: [{key}]"
    if key.startswith(_AXES):
        return f"no such key: choose {', '.join(AxisOptions.model_fields)}"
    if _leaf(key) in DEGREES:
        return f"no such key; did you mean parallelism.{DEGREES[_leaf(key)]}?"
    leaf = get_close_matches(_leaf(key), {_leaf(each) for each in known}, 1)
    near = get_close_matches(key, [each for each in known if _leaf(each) in leaf], 1, 0)
    return f"no such key; did you mean {near[0]}?" if near else "no such key; see --help"


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]
