"""From a TOML file and a command line to one frozen JobConfig, and back to TOML.

Both sources are validated apart, so that a TOML string where a number belongs is an error although
every command-line value arrives as text, and so that each mistake can say where it stands.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

import tomli_w
from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import DATASETS_WITHOUT_PATH, JobConfig, Section
from titan_moe.config.named import find_config, what_is_there
from titan_moe.config.translate import (
    KEYS,
    Translation,
    converters_of,
    put,
    translate,
    unknown_key,
    value_remedy,
)
from titan_moe.runtime.files import write_whole

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_USAGE = "[CONFIG_FILE=PATH] ./run_train.sh [--TABLE.KEY VALUE ...]"
_CONFIG_FILE = "job.config_file"
_COMMAND_LINE = "command line"
_LONGEST_SHOWN = 120  # Characters of a value in a message.
_DEEPEST = 32  # Tables and lists in one another: ours end at 4.


class _CliSettings(JobConfig, BaseSettings):  # type: ignore[misc]
    """JobConfig as pydantic-settings wants it, to make an argument parser of."""


class _Parser(argparse.ArgumentParser):
    table: str | None = None
    """The only table whose keys --help prints."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError([f"{_COMMAND_LINE}: {message}"])

    def format_help(self) -> str:
        text = super().format_help()
        if self.table is None:
            return text
        groups = dict(re.findall(r"^(\S+) options:(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL))
        below = f"{self.table}."
        found = [name for name in groups if name == self.table or name.startswith(below)]
        if not found:
            self.error(f"--help {self.table}: no such table: choose from {', '.join(groups)}")
        return "".join(f"{name} options:{groups[name]}" for name in found)


def load_job(argv: list[str]) -> JobConfig:
    """Read `--job.config_file PATH`, put the `--table.key value` overrides on top, and validate.

    Instead of a path stands a name of `config.named` too.

    Without a file every key has its default. `--help` prints all keys, or those of the
    table named behind it, and exits. Raises ConfigError with everything that is wrong in file and
    command line together.
    """
    return read_job(argv)[0]


def read_job(argv: list[str]) -> tuple[JobConfig, list[str]]:
    """As `load_job`, with one line for whatever is not done as the file asks for it."""
    problems: list[str] = []
    from_file: dict[str, Any] = {}
    from_cli: dict[str, Any] = {}
    path, argv = _split_config_file(argv)
    try:
        from_file = {} if path is None else _read_toml(Path(path))
    except ConfigError as error:
        problems += error.lines
    try:
        from_cli, unknown = _read_command_line(argv)
        foreign, lines = _unknown_arguments(unknown)
        from_cli, problems = _merged(foreign, from_cli), problems + lines
    except ConfigError as error:
        problems += error.lines
    both = _merged(_without_paths(from_file, from_cli), from_cli)
    converters = converters_of(both)
    problems += _problems(translate(from_file, converters), source=str(path), strict=True)
    problems += _problems(translate(from_cli, converters), source=_COMMAND_LINE)
    if problems:
        raise ConfigError(problems)
    translation = translate(both, converters)
    return JobConfig.model_validate(translation.tables), translation.summary()


def _without_paths(from_file: dict[str, Any], from_cli: dict[str, Any]) -> dict[str, Any]:
    """`from_file` without the path of its data where the command line names data without one."""
    kept = dict(from_file)
    for table in ("training", "validation"):
        named, below = from_cli.get(table), from_file.get(table)
        if not (isinstance(named, dict) and isinstance(below, dict)):
            continue
        if named.get("dataset") in DATASETS_WITHOUT_PATH:
            kept[table] = {key: below[key] for key in below if key != "dataset_path"}
    return kept


def resolve(job: JobConfig, world_size: int) -> JobConfig:
    """Pin global_batch_size, of which the data order is a function. `job` has passed
    `checks.job.check`."""
    if job.training.global_batch_size != -1:
        return job
    shard = job.parallelism.shard_degree(world_size)
    assert shard is not None
    data_ranks = job.parallelism.data_parallel_replicate_degree * shard
    sequences = job.training.local_batch_size * data_ranks
    training = job.training.model_copy(update={"global_batch_size": sequences})
    return job.model_copy(update={"training": training})


def save_job(job: JobConfig, path: Path) -> None:
    """Write `job` as TOML; loading that file gives an equal config."""
    write_whole(path, as_toml(job))


def as_toml(job: JobConfig) -> str:
    """`job` as TOML text. None becomes an absent key."""
    tables = job.model_dump(exclude_none=True)
    if not job.stages:
        del tables["stages"]  # TOML refuses [[stages]] beside an empty list.
    return tomli_w.dumps(tables)


def known_keys(section: type[Section] = JobConfig, prefix: str = "") -> dict[str, Any]:
    """Every dotted key below `section` and the annotation of its values."""
    keys: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            keys |= known_keys(kind, f"{prefix}{name}.")
        else:
            keys[prefix + name] = kind
    return keys


def table_of_help(argv: list[str]) -> str | None:
    """The word behind --help."""
    words = (word for flag, word in pairwise(argv) if flag in ("-h", "--help") and word[0:1] != "-")
    return next(words, None)


def _split_config_file(argv: list[str]) -> tuple[str | None, list[str]]:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{_CONFIG_FILE}", "--config", dest="path", metavar="PATH")
    known, rest = parser.parse_known_args(argv)
    return known.path and find_config(known.path), rest


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        if _depth(values) <= _DEEPEST:
            return values
        problem = f"nests tables or lists more than {_DEEPEST} deep"
    except RecursionError:
        problem = f"nests tables or lists more than {_DEEPEST} deep"
    except FileNotFoundError as error:
        problem = f"cannot be read: {error.strerror}{what_is_there(str(path))}"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        problem = "is not UTF-8 text"
    except tomllib.TOMLDecodeError as error:
        problem = f"is not valid TOML: {error}"
    raise ConfigError([f"{_CONFIG_FILE} = {path}: {problem}"])


def _depth(values: dict[str, Any]) -> int:
    """How many tables and lists stand in one another, counted up to one more than _DEEPEST."""
    level: list[Any] = [values]
    for depth in range(_DEEPEST + 1):
        if not level:
            return depth
        inside = [each.values() if isinstance(each, dict) else each for each in level]
        level = [value for each in inside for value in each if isinstance(value, (dict, list))]
    return _DEEPEST + 1


def _read_command_line(argv: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The overrides as nested tables of text, and the arguments that are no key of ours."""
    parser = _Parser(usage=_USAGE, allow_abbrev=False)
    parser.table = table_of_help(argv)
    parser.add_argument(
        f"--{_CONFIG_FILE}",
        "--config",
        dest=_CONFIG_FILE,
        metavar="PATH",
        help="TOML file to start from.",
    )
    source: CliSettingsSource[_Parser] = CliSettingsSource(
        _CliSettings,
        root_parser=parser,
        add_argument_method=_add_argument,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_parse_none_str="null",
        cli_use_class_docs_for_groups=True,
    )
    namespace, unknown = parser.parse_known_args(argv)
    del namespace.__dict__[_CONFIG_FILE]
    try:
        values: dict[str, Any] = source(parsed_args=namespace)()
    except SettingsError as error:
        raise ConfigError([f"{_COMMAND_LINE}: {error}"]) from None
    for key, kind in known_keys().items():
        if choices := _choices(kind):
            _name_choice(values, key.split("."), choices)
    return values, unknown


def _add_argument(parser: argparse.ArgumentParser, *names: str, **options: Any) -> None:
    if options.get("metavar") == "bool":
        options |= {"nargs": "?", "const": "true"}
    parser.add_argument(*names, **options)


def _choices(kind: Any) -> tuple[Any, ...]:
    """The values that a key may have, if they are named one by one; it may also be left out."""
    alternatives = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return next((get_args(each) for each in alternatives if get_origin(each) is Literal), ())


def _name_choice(values: dict[str, Any], path: list[str], choices: tuple[Any, ...]) -> None:
    """Replace text by the choice it names: pydantic takes no "8" for Literal[8]."""
    *tables, key = path
    for table in tables:
        values = values.get(table, {})
    if isinstance(values, dict) and key in values:
        values[key] = {str(choice): choice for choice in choices}.get(values[key], values[key])


def _unknown_arguments(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Tables of those that torchtitan has, and a line for each other argument."""
    foreign: dict[str, Any] = {}
    lines: list[str] = []
    while arguments:
        argument, *arguments = arguments
        if not argument.startswith("--"):
            lines.append(f"{_COMMAND_LINE}: {argument!r} belongs to no --table.key")
            continue
        key, equals, value = argument[2:].partition("=")
        if not equals and arguments and not arguments[0].startswith("--"):
            value, *arguments = arguments
        if key in KEYS:
            put(foreign, key, _json_or_text(value))
        else:
            lines.append(unknown_key(key, value, known_keys(), source=_COMMAND_LINE))
    return foreign, lines


def _json_or_text(text: str) -> Any:
    """The value of a command line's text; a flag without one is true."""
    try:
        return json.loads(text.lower() or "true")
    except ValueError:
        return text


def _problems(translation: Translation, *, source: str, strict: bool = False) -> list[str]:
    try:
        JobConfig.model_validate(translation.tables, strict=strict)
    except ValidationError as error:
        return [line for problem in error.errors() for line in _lines(problem, source)]
    return []


def _lines(problem: Mapping[str, Any], source: str) -> list[str]:
    key = ".".join(str(part) for part in problem["loc"])
    value, message = problem["input"], problem["msg"]
    if problem["type"] == "extra_forbidden":
        leaves = dict(_leaves(key, value)) or {key: value}
        return [
            unknown_key(leaf, _shown(given), known_keys(), source=source)
            for leaf, given in leaves.items()
        ]
    if problem["type"] == "model_type":
        message = f"must be a table: [{key}]"
    elif problem["type"] == "missing":
        return [f"{key} ({source}): is required"]
    message = message.replace("Input should be", "must be")
    if remedy := value_remedy(key, value):
        message = remedy
    return [f"{key} = {_shown(value)} ({source}): {message}"]


def _leaves(key: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(key, value)]
    return [leaf for name, inner in value.items() for leaf in _leaves(f"{key}.{name}", inner)]


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    half = _LONGEST_SHOWN // 2
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:half]} … {text[-half:]}"


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        inner = merged.get(key)
        nested = isinstance(value, dict) and isinstance(inner, dict)
        merged[key] = _merged(inner, value) if nested else value  # type: ignore[arg-type]
    return merged
