"""Routing records: the folder in which a training keeps the decision of every token and layer.

    record.json                 the MoE layers, experts and experts per token of the model, and the
                                keys per query of its indexers, if it has some
    step-12.rank-3-of-8.npz     what rank 3 of 8 decided in step 12: "rows" [N, 2], which names
                                sequences, positions [P], experts [N, P, K] of each MoE layer, best
                                first, and keys [N, P, W] of each indexer, a bit for each key

A token goes by sequence and position, so a record made in one layout is read in any other. Records
of inference engines (`engine_routes.py`) have tokens without experts: each is the model's number of
experts. A file gets its name when it is whole, and a step counts when it has the files of all its
ranks.
"""

import json
import logging
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from titan_moe.config.errors import ConfigError
from titan_moe.runtime.errors import RunError, reason
from titan_moe.runtime.files import set_aside, write_whole

logger = logging.getLogger(__name__)

_HEADER = "record.json"
_FILE = re.compile(r"step-(\d+)\.rank-(\d+)-of-(\d+)\.npz")
_UNREADABLE = (
    *(OSError, EOFError, ValueError, KeyError, AttributeError, TypeError),  # Of a single array too.
    *(BadZipFile, zlib.error),
)


class SequenceName(NamedTuple):
    """Identifies a sequence of a step in any layout and order."""

    fingerprint: int
    """CRC32 of the sequence (`data.batch.fingerprints`)."""
    number: int
    """0, 1, ... among the sequences of the step with this fingerprint, in their order."""


class Tokens(NamedTuple):
    """Tokens of a step: the same positions of each of some sequences."""

    sequences: list[SequenceName]
    positions: NDArray[np.int64]


class Form(NamedTuple):
    """The numbers that stand for a layer's decision about a token."""

    width: int
    dtype: type[np.unsignedinteger[Any]]
    limit: int
    """All numbers are smaller. Experts may be this, where the layer is to decide itself."""


class Dims(NamedTuple):
    """The facts that a record shares with the run that replays it."""

    layers: list[str]
    num_experts: int
    top_k: int
    index_top_k: int = 0
    """Keys that an indexer selects for a query. 0: no indexer."""
    across_documents: bool = False
    """Indexers select keys of other documents too (training.mask_documents = false)."""

    @property
    def experts(self) -> Form:
        """The form of an MoE layer's decision."""
        return Form(self.top_k, np.uint16, self.num_experts)


def form_of_keys(num_keys: int) -> Form:
    """The form of an indexer's decision in sequences of so many keys (`ops.sparse_attention`)."""
    return Form(-(-num_keys // 8), np.uint8, 256)


def name_sequences(fingerprints: Iterable[int], before: Iterable[int] = ()) -> list[SequenceName]:
    """Number the sequences of each fingerprint, of which there may be some `before` these."""
    seen, names = Counter(before), []
    for fingerprint in fingerprints:
        names.append(SequenceName(fingerprint, seen[fingerprint]))
        seen[fingerprint] += 1
    return names


def start_record(folder: Path, dims: Dims, *, after: int) -> None:
    """Make a record ready for the steps after `after`; one rank's job.

    A run that begins sets an earlier record aside as FOLDER.1, FOLDER.2, ...; one that resumes goes
    on with it, without the steps that it runs again. Raises ConfigError for a record of another
    model.
    """
    exists = (folder / _HEADER).is_file()
    if exists and after == 0:
        kept = set_aside(folder, lambda number: f"{folder.name}.{number}")
        logger.info("%s was recorded by an earlier run: kept as %s", folder, kept.name)
    elif exists:
        Record(folder).check(dims, key="debug.routing_record")
        for path in folder.iterdir():
            if (match := _FILE.fullmatch(path.name)) and int(match[1]) > after:
                path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / _HEADER, json.dumps(dims._asdict()))


class RecordWriter:
    """Writes one rank's files, until they fill `limit_gb`. The record then ends for all ranks,
    because a step counts when all its files are there."""

    def __init__(self, folder: Path, rank: int, world_size: int, limit_gb: float) -> None:
        self._folder, self._limit_gb = folder, limit_gb
        self._rank = f"rank-{rank}-of-{world_size}"
        earlier = folder.glob(f"step-*.rank-{rank}-of-*.npz")
        self._bytes = sum(path.stat().st_size for path in earlier)

    def write(self, step: int, tokens: Tokens, decisions: Mapping[str, Any]) -> None:
        """Write one step's file; does nothing once the record is full."""
        if self._bytes > self._limit_gb * 1e9:
            return
        self._bytes += sum(numbers_NPW.nbytes for numbers_NPW in decisions.values())
        if self._bytes > self._limit_gb * 1e9:
            key = f"debug.routing_record_gb={self._limit_gb:g}"
            logger.warning("%s ends before step %d: a rank reached %s", self._folder, step, key)
            return
        path = self._folder / f"step-{step}.{self._rank}.npz"
        with (aside := path.with_name(f".{path.name}.tmp")).open("wb") as file:
            np.savez(file, rows=np.array(tokens.sequences), positions=tokens.positions, **decisions)
        aside.replace(path)


class Record:
    """A record to read. Raises ConfigError where there is none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.dims = Dims(**json.loads((folder / _HEADER).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, AttributeError):
            raise ConfigError(f"{folder}: there is no routing record ({_HEADER})") from None
        found: dict[int, dict[tuple[int, int], Path]] = defaultdict(dict)
        for path in folder.iterdir():
            if match := _FILE.fullmatch(path.name):
                step, rank, ranks = map(int, match.groups())
                found[step][rank, ranks] = path
        self.steps = {
            step: [paths[rank] for rank in sorted(paths)]
            for step, paths in sorted(found.items())
            if all(ranks == len(paths) for _, ranks in paths)
        }
        """The files of each step of which every rank's file is there."""

    def check(self, dims: Dims, *, key: str, steps: range = range(0)) -> None:
        """Raise ConfigError if the record, a folder that `key` names, is of another kind of run or
        lacks one of the steps."""
        lines = [
            f"{key}={self.folder} was recorded with {name}={theirs}, this run has {ours}: name a "
            f"record of such a run"
            for name, theirs, ours in zip(Dims._fields, self.dims, dims, strict=True)
            if theirs != ours
        ]
        if missing := set(steps).difference(self.steps):
            lines.append(
                f"{key}={self.folder} lacks step {min(missing)} of training.steps={steps[-1]}, or "
                f"a rank's file of it: train fewer steps, or record more (debug.routing_record_gb)"
            )
        if lines:
            raise ConfigError(lines)

    def decisions(
        self, step: int, wanted: Mapping[str, tuple[Tokens, Form]]
    ) -> dict[str, NDArray[Any]]:
        """Returns the decisions [N, P, W] of each wanted layer about these tokens.

        Raises RunError for a damaged file and for tokens that the record does not have.
        """
        found = {
            layer: np.empty((len(tokens.sequences), len(tokens.positions), form.width), form.dtype)
            for layer, (tokens, form) in wanted.items()
        }
        missing = {layer: np.ones(out_NPW.shape[:2], bool) for layer, out_NPW in found.items()}
        for path in self.steps[step]:
            with opened_file(path) as (there, arrays):
                for layer, (tokens, form) in wanted.items():
                    ours, theirs = _shared(tokens, there)
                    if layer in arrays and missing[layer][ours].size:
                        found[layer][ours] = _read(arrays[layer], there, form)[theirs]
                        missing[layer][ours] = False
        for layer, missing_NP in missing.items():
            if missing_NP.any():
                tokens, _ = wanted[layer]
                number, position = np.argwhere(missing_NP)[0]
                raise RunError(
                    f"step {step} of {self.folder} has no routing of {layer} for the sequence "
                    f"{tokens.sequences[number].fingerprint:08x} at position "
                    f"{tokens.positions[position]}: it is of other data"
                )
        return found


@contextmanager
def opened_file(path: Path) -> Iterator[tuple[Tokens, NpzFile]]:
    """Gives a file's tokens, and its arrays, which are read when they are asked for; a CRC32 in the
    file covers each. Raises RunError for a damaged file, also from within."""
    try:
        with np.load(path) as arrays:
            sequences = [SequenceName(*name) for name in arrays["rows"].tolist()]
            yield Tokens(sequences, arrays["positions"]), arrays
    except _UNREADABLE as error:
        raise RunError(f"{path} is damaged, or no file of a record: {reason(error)}") from None


def _read(numbers_NPW: NDArray[Any], tokens: Tokens, form: Form) -> NDArray[Any]:
    """Returns a layer's decisions about these tokens. Raises ValueError if they are none."""
    shape = len(tokens.sequences), len(tokens.positions), form.width
    if numbers_NPW.shape != shape or numbers_NPW.max(initial=0) > form.limit:
        raise ValueError("a layer has other tokens or choices than its record")
    return numbers_NPW


def _shared(ours: Tokens, theirs: Tokens) -> tuple[Any, Any]:
    """Returns two indices of [N, P] arrays: where the tokens that both have are in either."""
    known = {name: place for place, name in enumerate(theirs.sequences)}
    pairs = [(i, known[name]) for i, name in enumerate(ours.sequences) if name in known]
    ours_N, theirs_N = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    _, ours_P, theirs_P = np.intersect1d(
        ours.positions, theirs.positions, assume_unique=True, return_indices=True
    )
    return np.ix_(ours_N, ours_P), np.ix_(theirs_N, theirs_P)
