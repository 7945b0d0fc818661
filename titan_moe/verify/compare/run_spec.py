"""One of the trainings that are compared, as a user describes it in a few words.

""                                          the working tree, as the common options say
"revision=main"                             the code of a commit, from a clean worktree
"layout=tp=2,ep=2"                          another layout; its ranks follow from it
"ranks=8 layout=tp=2 --optimizer.lr 1e-3"   and any key of the configuration
"config=configs/qwen3/debugmodel_moe.toml"  another file
"outputs/yesterday"                         a finished run, by its folder
"tests/goldens/qwen3"                       a golden file, or a folder of them
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os.path import expanduser
from pathlib import Path

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import DEGREES, JobConfig, shard_degree
from titan_moe.config.named import find_config
from titan_moe.config.parse import keys_that_read, load_job, resolve
from titan_moe.verify.layouts.layouts import OPTION_KEYS, Layout, layout_tables, parse

Words = tuple[tuple[str, str], ...]
"""Overrides as pairs of key and text; of a key that comes twice, the last counts."""

_KEYS = ("revision", "config", "ranks", "layout")
_PATHS = keys_that_read()
INPUT_KEYS = frozenset(key.rpartition(".")[2] for key in _PATHS)
"""Keys of any table that name what a training reads."""


@dataclass(frozen=True)
class RunSpec:
    """A finished run by its path, or a training to be run."""

    text: str = ""
    """The user's text."""
    path: Path | None = None
    revision: str = ""
    """A git revision; empty: the working tree."""
    config: Path | None = None
    ranks: int | None = None
    layout: Layout | None = None
    named: frozenset[str] = frozenset()
    """The words of the layout that the user wrote. The file sets axes that are left out."""
    overrides: Words = ()

    def arguments(self, *more: tuple[str, str]) -> list[str]:
        """The command line of this training, without its file; `more` overrides all else."""
        pairs = dict((*self.overrides, *self._layout_words(), *more))
        return [word for key, value in pairs.items() for word in (f"--{key}", value)]

    def job(self, *, global_batch: int | None = None) -> JobConfig:
        """The resolved configuration, as this code reads it; raises ConfigError.

        Args:
            global_batch: its sequences, where the configuration does not say.
        """
        job = load_job([*self.file(), *self.arguments()])
        if global_batch is not None and job.training.global_batch_size == -1:
            job = job.with_values(training={"global_batch_size": global_batch})
        if job.parallelism.shard_degree(self.world_size) is None:
            name = self.text or "a run"
            raise ConfigError(
                f"{name}: the degrees of [parallelism] do not fit {self.world_size} ranks"
            )
        return resolve(job, self.world_size)

    def file(self) -> list[str]:
        return [] if self.config is None else ["--job.config_file", str(self.config)]

    @property
    def world_size(self) -> int:
        """Ranks of this training."""
        return 1 if self.ranks is None else self.ranks

    def with_layout(self, layout: Layout) -> "RunSpec":
        """Returns this run in another layout, on as many ranks as that layout has."""
        named = {option for option in OPTION_KEYS if layout.has(option)}
        return replace(
            self,
            text=f"{self.text} in layout {layout}".strip(),
            layout=layout,
            ranks=layout.world_size,
            named=self.named | named,
        )

    def _layout_words(self) -> Words:
        if self.layout is None:
            return ()
        tables = layout_tables(self.layout)
        table = tables["parallelism"]
        keys = [key for key in table if key.endswith("_degree")]
        keys += [key for option, key in OPTION_KEYS.items() if option in self.named]
        words = words_of("parallelism", **{key: table[key] for key in keys})
        if "recompute" in self.named:
            words += words_of("activation_checkpoint", **tables["activation_checkpoint"])
        return words


def words_of(table: str, **keys: object) -> Words:
    """Returns overrides of a table's keys."""
    return tuple(
        (f"{table}.{key}", str(value).lower() if isinstance(value, bool) else str(value))
        for key, value in keys.items()
    )


def parse_run_spec(text: str, common: RunSpec, *, default_ranks: int = 1) -> RunSpec:
    """A run as described above; what it leaves out is as `common` has it, and where nothing
    says the ranks, `default_ranks`.

    Raises ConfigError with a line for each unknown word.
    """
    words = split_words(text)
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    named, overrides = words[:first], words[first:]
    if len(named) == 1 and named[0].partition("=")[0] not in _KEYS:
        return _finished(text, Path(expanduser(named[0])), overrides)
    values = {}
    for word in named:
        key, _, value = word.partition("=")
        if key not in _KEYS or not value:
            raise ConfigError(
                f"{text!r}: {word!r} means nothing: write a finished run's folder alone, or "
                f"{', '.join(f'{key}=...' for key in _KEYS)}, and then --table.key value"
            )
        values[key] = value
    spec = replace(
        common,
        text=text,
        revision=values.get("revision", common.revision),
        overrides=common.overrides + parse_overrides(overrides),
    )
    if "config" in values:
        spec = replace(spec, config=existing(Path(find_config(values["config"])), "config="))
    if ranks := values.get("ranks"):
        if not ranks.isdecimal() or int(ranks) < 1:
            raise ConfigError(f"ranks={ranks} must be a positive number")
        spec = replace(spec, ranks=int(ranks))
    if "layout" in values:
        spec = _laid_out(spec, values["layout"])
    return spec if spec.ranks is not None else replace(spec, ranks=default_ranks)


def split_words(text: str) -> list[str]:
    """Splits as a shell does. Raises ConfigError for a quote without its end."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{text!r}: {error}") from None


def parse_overrides(words: Sequence[str]) -> Words:
    """`--table.key value`, `--table.key=value` and bare switches. Paths become absolute: each run
    has a working folder of its own."""
    pairs: list[tuple[str, str | None]] = []
    for word in words:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            pairs.append((key, value if equals else None))
        elif pairs and pairs[-1][1] is None:
            pairs[-1] = (pairs[-1][0], word)
        else:
            raise ConfigError(f"{word!r}: overrides are --table.key value")
    return tuple((key, _absolute(key, "true" if v is None else v)) for key, v in pairs)


def existing(path: Path, what: str) -> Path:
    """The path, made absolute; ConfigError if it is not there."""
    if not path.exists():
        raise ConfigError(f"{what}{path}: there is no such file")
    return path.resolve()


def _absolute(key: str, value: str) -> str:
    path = Path(expanduser(value))
    return str(path.resolve()) if key in _PATHS and path.exists() else value


def _finished(text: str, path: Path, overrides: list[str]) -> RunSpec:
    if overrides:
        raise ConfigError(f"{text!r}: a finished run takes no overrides: leave {overrides} out")
    if not path.exists():
        keys = ", ".join(f"{key}=..." for key in _KEYS)
        raise ConfigError(f"{text!r}: no such run; a run to be made is written as {keys}")
    return RunSpec(text, path=path)


def _laid_out(spec: RunSpec, text: str) -> RunSpec:
    """Lays a spec out. A missing dp_shard takes the rest of the ranks, or what ep and etp need."""
    words, ranks = [word.partition("=") for word in text.split(",")], spec.ranks
    sizes = {key: int(value) for key, _, value in words if value.isdecimal() and int(value)}
    if "dp_shard" not in sizes:
        degrees = dict.fromkeys(DEGREES, 1) | sizes | {"dp_shard": -1}
        least = degrees["ep"] * degrees["etp"] // (degrees["cp"] * degrees["tp"])
        shard = shard_degree(degrees, ranks) if ranks else least
        text += f",dp_shard={shard or 1}"
    layout = parse(text)
    if ranks and layout.world_size != ranks:
        raise ConfigError(f"ranks={ranks}: layout={text} has {layout.world_size} ranks")
    named = frozenset(key for key, _, _ in words)
    return replace(spec, layout=layout, ranks=layout.world_size, named=named)
