"""Routing traces: `debug.routing_record` keeps every choice of experts that training makes, and
`debug.routing_replay` repeats those of a record, in any layout.

A record is a folder:

    record.json                 the MoE layers, experts and experts per token of the model
    step-12.rank-3-of-8.npz     what rank 3 of 8 routed in step 12, its part: rows [R, 2],
                                positions [P], and experts [R, P, K] of each MoE layer, best first

A token goes by row and position, so a record made in one layout is read in any other. A file gets
its name when it is whole, and a step counts when it has the parts of all its ranks.

A replay goes to the recorded experts. Their weights are the router's own scores of them, computed
live, so that gradients reach the router as ever. routing_flips.jsonl counts for each step and layer
how many of the `slots` (tokens x top_k) the run's own router would have sent to other experts.
Validation is neither recorded nor replayed.
"""

import json
import logging
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
import torch.distributed as dist
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray
from torch import Tensor

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.data.batch import Batch, fingerprints
from titan_moe.distributed.agreement import on_rank_zero
from titan_moe.distributed.collectives import gather_parts
from titan_moe.distributed.parallelize import ShardedModel
from titan_moe.metrics.jsonl import JsonLines
from titan_moe.moe.layer import MoE
from titan_moe.runtime.errors import RunError, reason
from titan_moe.runtime.files import set_aside, write_whole
from titan_moe.runtime.process import Process

logger = logging.getLogger(__name__)

FLIPS_FILE = "routing_flips.jsonl"
_HEADER = "record.json"
_PART = re.compile(r"step-(\d+)\.rank-(\d+)-of-(\d+)\.npz")
_UNREADABLE = (OSError, EOFError, ValueError, KeyError, TypeError, BadZipFile, zlib.error)


class RowName(NamedTuple):
    """Identifies a row of a step in any layout and order."""

    fingerprint: int
    """CRC32 of the row (`data.batch.fingerprints`)."""
    number: int
    """0, 1, ... among the rows of the step with this fingerprint, in their order."""


class Tokens(NamedTuple):
    """The tokens that a rank routes in a step: the same positions of each of its rows."""

    rows: list[RowName]
    positions: NDArray[np.int64]


class Dims(NamedTuple):
    """The facts of a model that a record shares with the run that replays it."""

    layers: list[str]
    num_experts: int
    top_k: int


def name_rows(fingerprints: Iterable[int], before: Iterable[int] = ()) -> list[RowName]:
    """Number the rows of each fingerprint, of which there may be some `before` these."""
    seen, names = Counter(before), []
    for fingerprint in fingerprints:
        names.append(RowName(fingerprint, seen[fingerprint]))
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
            if (part := _PART.fullmatch(path.name)) and int(part[1]) > after:
                path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / _HEADER, json.dumps(dims._asdict()))


class RecordWriter:
    """Writes one rank's parts, until they fill `limit_gb`. The record then ends for all ranks,
    because a step counts when all its parts are there."""

    def __init__(self, folder: Path, *, rank: int, world_size: int, limit_gb: float) -> None:
        self._folder, self._limit_gb = folder, limit_gb
        self._rank = f"rank-{rank}-of-{world_size}"
        earlier = folder.glob(f"step-*.rank-{rank}-of-*.npz")
        self._bytes = sum(path.stat().st_size for path in earlier)

    def write(self, step: int, tokens: Tokens, experts: Mapping[str, NDArray[np.uint16]]) -> None:
        """Write one step's part; does nothing once the record is full."""
        if self._bytes > self._limit_gb * 1e9:
            return
        self._bytes += sum(experts_RPK.nbytes for experts_RPK in experts.values())
        if self._bytes > self._limit_gb * 1e9:
            key = f"debug.routing_record_gb={self._limit_gb:g}"
            logger.warning("%s ends before step %d: a rank reached %s", self._folder, step, key)
            return
        path = self._folder / f"step-{step}.{self._rank}.npz"
        names = {"rows": np.array(tokens.rows), "positions": tokens.positions}
        arrays: dict[str, Any] = {**names, **experts}
        with (aside := path.with_name(f".{path.name}.tmp")).open("wb") as file:
            np.savez(file, **arrays)
        aside.replace(path)


class Record:
    """A record to read. Raises ConfigError where there is none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            header = json.loads((folder / _HEADER).read_text(encoding="utf-8"))
            self.dims = Dims(**header)
        except (OSError, ValueError, TypeError, AttributeError):
            raise ConfigError([f"{folder}: there is no routing record ({_HEADER})"]) from None
        found: dict[int, dict[tuple[int, int], Path]] = defaultdict(dict)
        for path in folder.iterdir():
            if match := _PART.fullmatch(path.name):
                step, rank, ranks = map(int, match.groups())
                found[step][rank, ranks] = path
        self.steps = {
            step: [Part(paths[rank], self.dims) for rank in sorted(paths)]
            for step, paths in sorted(found.items())
            if all(ranks == len(paths) for _, ranks in paths)
        }
        """The parts of each step of which every rank's part is there."""

    def check(self, dims: Dims, *, key: str, steps: range = range(0)) -> None:
        """Raise ConfigError if the record, a folder that `key` names, is of another model or lacks
        one of the steps."""
        lines = [
            f"{key}={self.folder} is of a model with {name}={theirs}, this one has {ours}: name a "
            f"record of this model"
            for name, theirs, ours in zip(Dims._fields, self.dims, dims, strict=True)
            if theirs != ours
        ]
        if missing := set(steps).difference(self.steps):
            lines.append(
                f"{key}={self.folder} lacks step {min(missing)} of training.steps={steps[-1]}, or "
                f"a rank's part of it: train fewer steps, or record more (debug.routing_record_gb)"
            )
        if lines:
            raise ConfigError(lines)

    def experts(self, step: int, layer: str, tokens: Tokens) -> NDArray[np.uint16]:
        """Returns the experts of these tokens [R, P, K], best first.

        Raises RunError for a damaged part and for tokens that the record does not have.
        """
        missing_RP = np.ones((len(tokens.rows), len(tokens.positions)), dtype=bool)
        out_RPK = np.empty((*missing_RP.shape, self.dims.top_k), np.uint16)
        for part in self.steps[step]:
            ours, theirs = part.find(tokens)
            if part.has(layer) and missing_RP[ours].size:
                out_RPK[ours] = part.read(layer)[theirs]
                missing_RP[ours] = False
        if missing_RP.any():
            row, position = np.argwhere(missing_RP)[0]
            raise RunError(
                f"step {step} of {self.folder} has no routing of {layer} for the row "
                f"{tokens.rows[row].fingerprint:08x} at position {tokens.positions[position]}: it "
                f"is of other data"
            )
        return out_RPK


class Part:
    """One rank's file of a step; its arrays are read when they are asked for."""

    def __init__(self, path: Path, dims: Dims) -> None:
        self._path, self._dims = path, dims

    @cached_property
    def _arrays(self) -> Mapping[str, NDArray[Any]]:
        with _readable(self._path):
            opened = np.load(self._path)
            if not isinstance(opened, NpzFile):  # It may be a single array.
                raise ValueError("it is no archive of arrays")
            return opened

    @cached_property
    def tokens(self) -> Tokens:
        with _readable(self._path):
            rows = [RowName(*row) for row in self._arrays["rows"].tolist()]
            return Tokens(rows, self._arrays["positions"])

    def has(self, layer: str) -> bool:
        return layer in self._arrays

    def find(self, tokens: Tokens) -> tuple[Any, Any]:
        """Returns two indices of [R, P] arrays: which of the tokens are in this part, and where."""
        known = {row: place for place, row in enumerate(self.tokens.rows)}
        rows = [(i, known[row]) for i, row in enumerate(tokens.rows) if row in known]
        ours_R, theirs_R = np.array(rows, dtype=np.int64).reshape(-1, 2).T
        _, ours_P, theirs_P = np.intersect1d(
            tokens.positions, self.tokens.positions, assume_unique=True, return_indices=True
        )
        return np.ix_(ours_R, ours_P), np.ix_(theirs_R, theirs_P)

    def read(self, layer: str) -> NDArray[np.uint16]:
        """Returns the experts of a layer for `tokens`; a CRC32 in the archive covers them."""
        shape = len(self.tokens.rows), len(self.tokens.positions), self._dims.top_k
        with _readable(self._path):
            experts_RPK = self._arrays[layer]
            if experts_RPK.shape != shape or experts_RPK.max(initial=0) >= self._dims.num_experts:
                raise ValueError(f"{layer} has other tokens or experts than its record")
            return experts_RPK


class RoutingTrace:
    """Records a run's routings, replays those of a record, does both, or neither. The record of a
    run that replays holds the experts that it used. `resume_step`: the last step before this start.

    Raises ConfigError where a record cannot be written, or cannot be followed to the last step.
    """

    def __init__(
        self, job: JobConfig, sharded: ShardedModel, process: Process, *, resume_step: int
    ) -> None:
        self._sharded, self._device = sharded, process.device
        self._replayed: Record | None = None
        self._writer: RecordWriter | None = None
        self._flips: JsonLines | None = None
        replay, record = job.debug.routing_replay, job.debug.routing_record
        if replay is None and record is None:
            return
        moe = sharded.config.moe
        assert moe is not None, "the configuration's own checks let this through"
        layers = [_short(name) for name in sharded.all_moe_layers()]
        self._dims = Dims(layers, moe.num_experts, moe.top_k)
        self._slots = job.training.global_batch_size * job.training.seq_len * self._dims.top_k
        if replay is not None:
            self._replayed = Record(Path(replay))
            steps = range(resume_step + 1, job.training.steps + 1)
            self._replayed.check(self._dims, key="debug.routing_replay", steps=steps)
            if process.is_main:
                path = Path(job.job.dump_folder) / FLIPS_FILE
                self._flips = JsonLines(path, resume_step=resume_step)
        if record is not None:
            folder, limit_gb = Path(record), job.debug.routing_record_gb
            start = partial(start_record, folder, self._dims, after=resume_step)
            on_rank_zero(start, doing=f"starting {folder}")
            ranks = {"rank": process.rank, "world_size": process.world_size}
            self._writer = RecordWriter(folder, **ranks, limit_gb=limit_gb)
        self._layers = {_short(name): _Layer(moe) for name, moe in sharded.moe_layers().items()}

    @contextmanager
    def step(self, step: int, batches: Sequence[Batch]) -> Iterator[None]:
        """Wrap the training of one step on these batches. Collective if the run has a trace."""
        if self._replayed is None and self._writer is None:
            yield
            return
        tokens = self._tokens(batches)
        for name, layer in self._layers.items():
            if self._replayed is not None:
                experts_RPK = self._replayed.experts(step, name, tokens).astype(np.int64)
                ahead_TK = torch.from_numpy(experts_RPK).flatten(0, 1)
                layer.ahead_TK = ahead_TK.to(self._device, non_blocking=True)
        yield
        if self._replayed is not None:
            self._count_flips(step)
        shape = len(tokens.rows), len(tokens.positions), self._dims.top_k
        taken = {name: layer.take(shape) for name, layer in self._layers.items()}
        if self._writer is not None:
            self._writer.write(step, tokens, taken)

    def _count_flips(self, step: int) -> None:
        """Write how many choices of each layer the run's own router would make otherwise."""
        flips_L = torch.zeros(len(self._dims.layers), dtype=torch.int64, device=self._device)
        for place, name in enumerate(self._dims.layers):
            if name in self._layers:
                flips_L[place] = self._layers[name].take_flips()
        dist.all_reduce(flips_L)
        if self._flips is not None:
            flips = dict(zip(self._dims.layers, flips_L.tolist(), strict=True))
            self._flips.write(step, {"slots": self._slots, "flips": flips})

    def _tokens(self, batches: Sequence[Batch]) -> Tokens:
        """Returns what this rank routes in a step, in order: microbatches run forward one after the
        other in every schedule of a pipeline."""
        dims, rank = self._sharded.meshes.dims, self._sharded.meshes.rank
        own = torch.tensor([crc for batch in batches for crc in fingerprints(batch)])
        world = dist.group.WORLD
        assert world is not None
        everyone = gather_parts(own.to(self._device), world)
        # Ranks that read the same rows have the same fingerprints: the first one's count.
        before = everyone[list(dims.group_of(0, "batch"))][: dims.coordinate(rank, "batch")]
        positions = self._sharded.positions(batches[0].tokens_BS.shape[1])
        part = positions.chunk(dims.tp)[dims.coordinate(rank, "tp")]
        return Tokens(name_rows(own.tolist(), before.flatten().tolist()), part.numpy())


class _Layer:
    """The routing function of one MoE layer. In training it follows the experts `ahead`, if any,
    and keeps its choices on the device, without a host sync in the step."""

    def __init__(self, moe: MoE) -> None:
        self._moe, self._select = moe, moe.routing_fn
        self._taken: list[Tensor] = []
        self._flips: list[Tensor] = []
        self.ahead_TK: Tensor | None = None
        moe.routing_fn = self

    def __call__(self, scores_TE: Tensor) -> Tensor:
        experts_TK = self._select(scores_TE)
        if not self._moe.training:
            return experts_TK
        if self.ahead_TK is not None:
            own_TK, num_tokens = experts_TK, len(experts_TK)
            experts_TK, self.ahead_TK = self.ahead_TK[:num_tokens], self.ahead_TK[num_tokens:]
            self._flips.append((own_TK[:, :, None] != experts_TK[:, None]).all(-1).sum())
        self._taken.append(experts_TK.to(torch.int16))
        return experts_TK

    def take(self, shape: tuple[int, int, int]) -> NDArray[np.uint16]:
        """Returns the choices of the step that ends, [R, P, K]."""
        taken_TK, self._taken = torch.cat(self._taken), []
        return taken_TK.cpu().numpy().view(np.uint16).reshape(shape)

    def take_flips(self) -> Tensor:
        """Returns how many choices of the step that ends the layer would make otherwise."""
        assert self.ahead_TK is not None and not len(self.ahead_TK), "tokens that were not routed"
        flips, self._flips = torch.stack(self._flips).sum(), []
        return flips


def _short(name: str) -> str:
    """Returns the name that metrics give a layer."""
    return name.removesuffix(".block")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except _UNREADABLE as error:
        raise RunError(f"{path} is damaged, or no part of a record: {reason(error)}") from None
