"""A routing record on disk: the experts that every token of a training went to. No torch.

    record.json                 the MoE layers, experts and experts per token of the model, CRC32
    step-12.rank-3-of-8.npz     what rank 3 of 8 routed in step 12: a part

A part has the names of its rows [R, 2], its positions in them [P], and of every MoE layer on its
rank the experts [R, P, K], best first, and their weights. A token goes by row and position, so that
a record made in one layout is read in any other. A file gets its name when it is whole, and a step
counts when it has the parts of all its ranks.

Weights are float32: drift between two runs begins at 1e-7, which float16 would round away. All
first bytes of the numbers are compressed together, then all second ones: exponents, and the high
byte of an expert's number, repeat, and mantissas do not.
"""

import json
import logging
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
import zstandard
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from titan_moe.config.errors import ConfigError
from titan_moe.runtime.errors import RunError, reason
from titan_moe.runtime.files import parse_json, set_aside, write_whole

logger = logging.getLogger(__name__)

_PART = re.compile(r"step-(\d+)\.rank-(\d+)-of-(\d+)\.npz")
_HEADER = "record.json"
_TYPES: Mapping[str, type[np.generic]] = {"experts": np.uint16, "weights": np.float32}
_UNREADABLE = (
    *(OSError, EOFError, ValueError, KeyError, TypeError, MemoryError, NotImplementedError),
    *(BadZipFile, zlib.error, zstandard.ZstdError),
)

_Places = tuple[NDArray[np.intp], ...]
"""Indices of a [R, P] array."""


class RowName(NamedTuple):
    """What a row of a step is known by in any layout and order."""

    fingerprint: int
    """Its CRC32 (`data.batch.fingerprints`)."""
    number: int
    """0, 1, ... among the rows of the step with this fingerprint, in their order."""


class Tokens(NamedTuple):
    """Those that a rank routes in a step: at the same positions in each of its rows."""

    rows: list[RowName]
    positions: NDArray[np.int64]


class Routing(NamedTuple):
    """What one MoE layer did with them."""

    experts_RPK: NDArray[np.uint16]
    weights_RPK: NDArray[np.float32]


@dataclass(frozen=True)
class Dims:
    """What a record and a model that replays it have in common."""

    layers: list[str]
    num_experts: int
    top_k: int


def name_rows(fingerprints: Iterable[int], before: Iterable[int] = ()) -> list[RowName]:
    """Number the rows of each fingerprint, of which there may be some `before` these."""
    seen: dict[int, int] = defaultdict(int)
    for fingerprint in before:
        seen[fingerprint] += 1
    names = []
    for fingerprint in fingerprints:
        names.append(RowName(fingerprint, seen[fingerprint]))
        seen[fingerprint] += 1
    return names


def is_record(folder: Path) -> bool:
    """Whether a folder has a record's header."""
    return (folder / _HEADER).is_file()


def start_record(folder: Path, dims: Dims, *, after: int) -> None:
    """Make a record ready for the steps after `after`; one rank's job.

    A run that begins sets an earlier record aside as FOLDER.1, FOLDER.2, ...; one that resumes goes
    on with it, without the steps that it runs again. Raises ConfigError for a record of another
    model.
    """
    if (folder / _HEADER).is_file():
        if after == 0:
            _keep_earlier(folder)
        else:
            Record(folder).check(dims, key="debug.routing_record")
            _drop_after(folder, after)
    folder.mkdir(parents=True, exist_ok=True)
    described = asdict(dims)
    write_whole(folder / _HEADER, json.dumps(described | {"crc32": _crc32(described)}))


def _keep_earlier(folder: Path) -> None:
    kept = set_aside(folder, lambda number: f"{folder.name}.{number}")
    logger.info("%s was recorded by an earlier run: kept as %s", folder, kept.name)


def _drop_after(folder: Path, step: int) -> None:
    for path in folder.iterdir():
        if (part := _PART.fullmatch(path.name)) and int(part[1]) > step:
            path.unlink()


class RecordWriter:
    """Writes one rank's parts, until a rank's fill `limit_gb`; from then on it is `full`.

    `agree` makes of whether this rank's next part fits whether all ranks' do, so that a record ends
    with a whole step.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        world_size: int,
        limit_gb: float,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        self.full = False
        self._folder = folder
        self._rank = f"rank-{rank}-of-{world_size}"
        self._limit_gb = limit_gb
        self._agree = agree
        earlier = folder.glob(f"step-*.rank-{rank}-of-*.npz")
        self._bytes = sum(path.stat().st_size for path in earlier)

    def write(self, step: int, tokens: Tokens, layers: Mapping[str, Routing]) -> None:
        """One step's part."""
        if self.full:
            return
        arrays: dict[str, Any] = {"rows": np.array(tokens.rows), "positions": tokens.positions}
        for name, (experts_RPK, weights_RPK) in layers.items():
            arrays[f"{name}.experts"] = _pack(experts_RPK)
            arrays[f"{name}.weights"] = _pack(weights_RPK)
        path = self._folder / f"step-{step}.{self._rank}.npz"
        with (aside := path.with_name(f".{path.name}.tmp")).open("wb") as file:
            np.savez(file, **arrays)
        self._bytes += aside.stat().st_size
        if self._agree(self._bytes <= self._limit_gb * 1e9):
            aside.replace(path)
            return
        self.full = True
        aside.unlink()
        logger.warning(
            "no routings are recorded from step %d on: a rank's part of %s has reached "
            "debug.routing_record_gb=%g",
            step,
            self._folder,
            self._limit_gb,
        )


class Record:
    """A finished record. ConfigError where there is none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            header = parse_json((folder / _HEADER).read_text(encoding="utf-8"))
            crc32 = header.pop("crc32", None)  # Records of earlier versions have none.
            self.dims = Dims(**header)
        except (OSError, ValueError, TypeError):
            raise ConfigError([f"{folder}: there is no routing record ({_HEADER})"]) from None
        if crc32 not in (None, _crc32(header)):
            raise ConfigError([f"{folder / _HEADER} is damaged: wrong CRC32"])
        parts: dict[int, dict[tuple[int, int], Path]] = defaultdict(dict)
        for path in folder.iterdir():
            if match := _PART.fullmatch(path.name):
                step, rank, ranks = map(int, match.groups())
                parts[step][rank, ranks] = path
        self._parts = {
            step: [paths[rank] for rank in sorted(paths)]
            for step, paths in sorted(parts.items())
            if all(ranks == len(paths) for _, ranks in paths)
        }

    @property
    def steps(self) -> list[int]:
        """The steps of which every rank's part is there."""
        return list(self._parts)

    def step(self, step: int) -> "RecordedStep":
        return RecordedStep(f"step {step} of {self.folder}", self._parts[step], self.dims)

    def check(self, dims: Dims, *, key: str) -> None:
        """ConfigError, of a folder that `key` names, if the record is of another model."""
        theirs, ours = asdict(self.dims), asdict(dims)
        lines = [
            f"{key}={self.folder} is of a model with {name}={theirs[name]}, this one has "
            f"{ours[name]}: name a record of this model"
            for name in ours
            if theirs[name] != ours[name]
        ]
        if lines:
            raise ConfigError(lines)


class RecordedStep:
    """One step of a record: all its ranks' parts. Its methods raise RunError for what is damaged
    or not there."""

    def __init__(self, name: str, paths: Sequence[Path], dims: Dims) -> None:
        self.name = name
        self.parts = [Part(path, dims) for path in paths]
        self._dims = dims

    def read_all(self) -> None:
        """Unpack every array, each of which has a CRC32 in its file."""
        for part in self.parts:
            assert part.tokens
            for layer in part.layers:
                part.read(layer, "experts")
                part.read(layer, "weights")

    def num_tokens(self, layer: str) -> int:
        """How many a layer routed."""
        tokens = [part.tokens for part in self.parts if layer in part.layers]
        return sum(len(rows) * len(positions) for rows, positions in tokens)

    def experts(self, layer: str, tokens: Tokens) -> NDArray[np.uint16]:
        """The experts of these tokens [R, P, K], best first."""
        return self._gather(layer, "experts", tokens)

    def weights(self, layer: str, tokens: Tokens) -> NDArray[np.float32]:
        """The weights of these tokens' experts [R, P, K]."""
        return self._gather(layer, "weights", tokens)

    def _gather(self, layer: str, what: str, tokens: Tokens) -> NDArray[Any]:
        missing_RP = np.ones((len(tokens.rows), len(tokens.positions)), dtype=bool)
        out_RPK = np.empty((*missing_RP.shape, self._dims.top_k), _TYPES[what])
        for part in self.parts:
            ours, theirs = part.find(tokens)
            if layer in part.layers and missing_RP[ours].size:
                out_RPK[ours] = part.read(layer, what)[theirs]
                missing_RP[ours] = False
        if missing_RP.any():
            row, position = np.argwhere(missing_RP)[0]
            raise RunError(
                f"{self.name} has no routing of {layer} for the row "
                f"{tokens.rows[row].fingerprint:08x} at position {tokens.positions[position]}: it "
                f"is of other data"
            )
        return out_RPK


class Part:
    """One rank's file of a step; its arrays are read when they are asked for."""

    def __init__(self, path: Path, dims: Dims) -> None:
        self._path = path
        self._dims = dims

    @cached_property
    def _arrays(self) -> Mapping[str, NDArray[Any]]:
        with _readable(self._path):
            opened = np.load(self._path)
            # What numpy opens may also be a single array.
            if not isinstance(opened, NpzFile):
                raise ValueError("it is no archive of arrays")
            return opened

    @cached_property
    def tokens(self) -> Tokens:
        with _readable(self._path):
            rows = [RowName(*row) for row in self._arrays["rows"].tolist()]
            return Tokens(rows, self._arrays["positions"])

    @cached_property
    def layers(self) -> list[str]:
        return [n.removesuffix(".experts") for n in self._arrays if n.endswith(".experts")]

    def find(self, tokens: Tokens) -> tuple[_Places, _Places]:
        """Where those of the tokens that are here stand among them, and where here."""
        rows = [(i, self._rows[row]) for i, row in enumerate(tokens.rows) if row in self._rows]
        ours_R, theirs_R = np.array(rows, dtype=np.int64).reshape(-1, 2).T
        _, ours_P, theirs_P = np.intersect1d(
            tokens.positions, self.tokens.positions, assume_unique=True, return_indices=True
        )
        return np.ix_(ours_R, ours_P), np.ix_(theirs_R, theirs_P)

    def read(self, layer: str, what: str) -> NDArray[Any]:
        """`experts` or `weights` of a layer, [R, P, K]."""
        shape = len(self.tokens.rows), len(self.tokens.positions), self._dims.top_k
        with _readable(self._path):
            array = _unpack(self._arrays[f"{layer}.{what}"], _TYPES[what], shape)
            if what == "experts" and array.max() >= self._dims.num_experts:
                raise ValueError(f"expert {array.max()} of {self._dims.num_experts} in {layer}")
            return array

    @cached_property
    def _rows(self) -> dict[RowName, int]:
        return {row: place for place, row in enumerate(self.tokens.rows)}


def _crc32(header: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(header, sort_keys=True).encode())


def _pack(array: NDArray[Any]) -> NDArray[np.uint8]:
    planes = np.ascontiguousarray(array).view(np.uint8).reshape(-1, array.itemsize).T
    return np.frombuffer(zstandard.compress(planes.tobytes(), level=1), np.uint8)


def _unpack(
    packed: NDArray[np.uint8], dtype: type[np.generic], shape: tuple[int, ...]
) -> NDArray[Any]:
    content, itemsize = packed.tobytes(), np.dtype(dtype).itemsize
    # Before anything is unpacked: a few bytes may claim to be terabytes.
    if (claimed := zstandard.frame_content_size(content)) != prod(shape) * itemsize:
        raise ValueError(f"{claimed} bytes instead of {prod(shape) * itemsize}")
    planes = np.frombuffer(zstandard.decompress(content), np.uint8)
    return np.ascontiguousarray(planes.reshape(itemsize, -1).T).view(dtype).reshape(shape)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except _UNREADABLE as error:
        raise RunError(f"{path} is damaged, or no part of a record: {reason(error)}") from None
