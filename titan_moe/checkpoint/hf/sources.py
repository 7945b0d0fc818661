"""Where a model's tensors come from: a Hugging Face folder, a checkpoint, or a model in memory.

All go by our names, and are read box by box. What takes them is `fill` (a model in memory),
`tensor_files.write_chunks` (a checkpoint) and `write_folder.export` (a Hugging Face folder).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from titan_moe.checkpoint.checksums import as_digits, box_sum
from titan_moe.checkpoint.hf.folder import HFFolder
from titan_moe.checkpoint.hf.names import EXPERT_BIAS, PREVIOUS_LOAD, Shapes, find
from titan_moe.checkpoint.hf.pieces import Box, cut, key, lengths, relative, whole
from titan_moe.checkpoint.manifest import Manifest, compare_checksums
from titan_moe.checkpoint.tensors import MODEL, Chunk, StoredTensors
from titan_moe.distributed.dtensor import local_part, local_slices
from titan_moe.models.hf import HFModel
from titan_moe.runtime.errors import RunError

# Elements handled together. With the file's bytes, a float32 copy of quantised ones and reading
# past what lies between short runs, a process holds some hundred MB beside its shard.
LARGEST = 2**24
# Elements of a chunk of an imported checkpoint: 256 MB in float32.
LARGEST_CHUNK = 2**26

T = TypeVar("T")
S = TypeVar("S")


class Source(Protocol):
    """Boxes of a model's tensors."""

    def boxes(self) -> Mapping[str, list[Box]]:
        """The boxes of whole tensors that this rank is to read. Those of all ranks cover every
        tensor; two are the same or do not overlap."""

    def read(self, name: str, box: Box) -> Iterator[tuple[Box, Tensor]]:
        """Boxes that make up a box, each with its values, of any type and on any device."""

    def verify(self) -> None:
        """Raises RunError when what has been read cannot be trusted; collective."""


class HFSource:
    """The tensors of a Hugging Face folder.

    The routing's buffers, which few folders have, get their first values. Raises RunError for a
    folder that is not of this model.
    """

    def __init__(self, folder: HFFolder, model: HFModel, shapes: Shapes) -> None:
        self.found = find(model, folder, shapes)
        """Our names -> where each tensor is; those that are not stored are left out."""
        self._folder, self._model, self._shapes = folder, model, shapes

    def boxes(self) -> dict[str, list[Box]]:
        """This rank's share of all tensors, cut into chunks."""
        chunks = [
            (name, box)
            for name, shape in self._shapes.items()
            for box in cut(whole(shape), LARGEST_CHUNK)
        ]
        mine: dict[str, list[Box]] = defaultdict(list)
        for name, box in _share([(chunk, prod(lengths(chunk[1]))) for chunk in chunks]):
            mine[name].append(box)
        return mine

    def read(self, name: str, box: Box) -> Iterator[tuple[Box, Tensor]]:
        """In pieces as they are stored, de-quantised."""
        if name not in self.found:
            yield box, self._first_value(name).expand(lengths(box))
            return
        for part in cut(box, LARGEST):
            for piece in self.found[name].pieces(part):
                theirs = self._folder.read(piece.tensor, piece.theirs)
                # An expert's own tensor has a dim less, which copy_ puts in front.
                yield piece.ours, theirs.transpose(-1, -2) if piece.transposed else theirs

    def verify(self) -> None:
        """A folder has no checksums."""

    def _first_value(self, name: str) -> Tensor:
        """Nothing has been routed yet: an even load, and no bias."""
        moe = self._model.config.moe
        assert moe is not None and name.endswith((EXPERT_BIAS, PREVIOUS_LOAD)), name
        return torch.tensor(1 / moe.num_experts if name.endswith(PREVIOUS_LOAD) else 0.0)


class CheckpointSource:
    """The stored chunks of a checkpoint's model, a share of them on each rank.

    Args:
        checksums: keep those of what is read, for `verify`.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, checksums: bool) -> None:
        self._reader = StoredTensors(folder)
        self._folder, self._manifest = folder, manifest
        # Gate and up projections take turns in some tensors of theirs: both to one rank.
        together: dict[tuple, list[tuple[str, Box]]] = defaultdict(list)
        for chunk in self._reader.chunks(MODEL):
            pair = chunk.name.replace(".w3", ".w1").replace(".b3", ".b1")
            together[pair, key(chunk.box)].append((chunk.name, chunk.box))
        shares = [(group, len(group) * prod(lengths(group[0][1]))) for group in together.values()]
        self._boxes: dict[str, list[Box]] = defaultdict(list)
        for name, box in (one for group in _share(shares) for one in group):
            self._boxes[name.removeprefix(MODEL)].append(box)
        self._sums: dict[tuple, int] | None = {} if checksums else None

    def boxes(self) -> Mapping[str, list[Box]]:
        """This rank's share of the stored chunks."""
        return self._boxes

    def read(self, name: str, box: Box) -> Iterator[tuple[Box, Tensor]]:
        """One of those chunks, whole."""
        spec = self._manifest.tensors[MODEL + name]
        chunk = Chunk(MODEL + name, box, spec.shape, getattr(torch, spec.dtype))
        values = self._reader.read(chunk)
        if self._sums is not None:
            self._sums[name, key(box)] = box_sum(values, chunk)
        yield box, values

    def verify(self) -> None:
        """Compare the checksums of what has been read with the manifest's."""
        sums: dict[str, int] = defaultdict(int)
        for (name, _), value in (self._sums or {}).items():
            sums[MODEL + name] += value
        if damaged := compare_checksums(self._manifest, total_checksums(sums)):
            raise RunError(
                f"checkpoint {self._folder} is damaged: wrong checksum of {', '.join(damaged[:4])}"
            )


class ModelSource:
    """This rank's parts of a model's tensors, by our names; their memory is shared."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def boxes(self) -> dict[str, list[Box]]:
        """One of each tensor."""
        return {name: [local_slices(tensor)] for name, tensor in self._tensors.items()}

    def read(self, name: str, box: Box) -> Iterator[tuple[Box, Tensor]]:
        """The part that this rank holds."""
        yield box, local_part(self._tensors[name]).detach()

    def verify(self) -> None:
        """Memory is trusted."""


@torch.no_grad()
def fill(
    tensors: Mapping[str, Tensor],
    boxes: Mapping[str, list[Box]],
    source: Source,
    advance: Callable[[int], object] = lambda num_bytes: None,
) -> None:
    """Copy boxes of whole tensors into this rank's parts of them, cast to their type.

    Args:
        tensors: plain or DTensors, by our names.
        boxes: within those parts.
        advance: is given the number of bytes that have been filled.
    """
    for name, own in boxes.items():
        part, origin = local_part(tensors[name]).detach(), local_slices(tensors[name])
        for box in own:
            for at, values in source.read(name, box):
                view = part[relative(at, origin)]
                view.copy_(values)
                advance(view.numel() * view.element_size())


def total_checksums(sums: Mapping[str, int]) -> dict[str, str]:
    """Checksums of tensors from what each rank's boxes add to them; collective."""
    everyone: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(sums))
    names = sorted(set().union(*everyone))
    return {name: as_digits(sum(own.get(name, 0) for own in everyone)) for name in names}


def one_ahead(make: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
    """`make` of each item, in order; in another thread the next is made while one is in use:
    reading and summing run beside writing."""
    with ThreadPoolExecutor(1) as pool:
        coming: list[Future[T]] = []
        for item in items:
            coming.append(pool.submit(make, item))
            if len(coming) == 2:
                yield coming.pop(0).result()
        while coming:
            yield coming.pop(0).result()


def progress_bar(what: str, total: int) -> tqdm:
    """A bar in bytes of this rank's own work, on rank 0's terminal if it has one."""
    others = dist.is_initialized() and dist.get_rank() != 0
    return tqdm(
        desc=what,
        total=total,
        unit="B",
        unit_scale=True,
        dynamic_ncols=True,
        leave=False,
        disable=True if others else None,  # None: off where the output is no terminal.
    )


def _share(weighted: list[tuple[T, int]]) -> list[T]:
    """This rank's share of things with a weight: always the lightest rank gets the next."""
    alone = not dist.is_initialized()
    rank, loads = (0, [0]) if alone else (dist.get_rank(), [0] * dist.get_world_size())
    mine = []
    for thing, weight in weighted:
        lightest = loads.index(min(loads))
        loads[lightest] += weight
        if lightest == rank:
            mine.append(thing)
    return mine
