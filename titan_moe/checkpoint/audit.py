"""Every byte of a checkpoint, an export or a routing record, read to say whether it is whole."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from titan_moe.checkpoint.checksums import as_digits, box_sum
from titan_moe.checkpoint.digests import DIGESTS, damaged_files, files, read_digests
from titan_moe.checkpoint.folder import saved_steps, step_folder
from titan_moe.checkpoint.hf.folder import HFFolder, is_hf_folder
from titan_moe.checkpoint.hf.read import progress_bar
from titan_moe.checkpoint.manifest import MANIFEST, compare_checksums, read_manifest
from titan_moe.checkpoint.tensors import METADATA, StoredTensors
from titan_moe.config.errors import ConfigError
from titan_moe.debug.routing_trace import Record, is_record
from titan_moe.runtime.errors import RunError


class Audit(NamedTuple):
    """What was found in a folder."""

    whole: list[str]
    """A line for each thing that is as it was written: what was read of it."""
    problems: list[str]
    """A line for each thing that is not."""


ReadAll = Callable[[Path, list[str]], str]
"""Of a folder; adds what is wrong to the list, and says what was read."""


def audit(path: Path) -> Audit:
    """Read all of a step-N folder, of a folder of those, of an export or of a routing record.

    Raises ConfigError where it is none of them.
    """
    found = Audit([], [])
    for folder in [step_folder(path, step) for step in saved_steps(path)] or [path]:
        problems: list[str] = []
        try:
            seen = _reader_of(folder)(folder, problems)
        except (RunError, OSError) as error:
            problems.append(str(error))
        if problems:
            found.problems.extend(f"{folder}: {line}" for line in problems)
        else:
            found.whole.append(f"{folder}: {seen}")
    return found


def _reader_of(folder: Path) -> ReadAll:
    if (folder / MANIFEST).exists() or (folder / METADATA).exists():
        return _read_checkpoint
    if is_hf_folder(folder):
        return _read_hf_folder
    if is_record(folder):
        return _read_record
    raise ConfigError(
        [
            f"{folder} is no checkpoint, Hugging Face folder or routing record: name a step-N "
            "folder, or the folder of several"
        ]
    )


def _read_checkpoint(folder: Path, problems: list[str]) -> str:
    manifest = read_manifest(folder)
    digested = _read_files(folder, problems)
    if problems:
        return digested
    stored = StoredTensors(folder)
    sums: dict[str, int] = defaultdict(int)
    for chunk in stored.chunks(""):
        sums[chunk.name] += box_sum(stored.read(chunk), chunk)
    found = {name: as_digits(total) for name, total in sums.items()}
    if extra := sorted(found.keys() - manifest.tensors.keys()):
        raise RunError(f"its manifest does not name {', '.join(extra)}")
    if missing := sorted(manifest.checksums.keys() - found.keys()):
        problems.append(f"it lacks {', '.join(missing)}")
    if not found:
        problems.append("it holds no tensor")
    if wrong := compare_checksums(manifest, found):
        problems.append(f"wrong checksum of {', '.join(wrong)}")
    return f"checkpoint of step {manifest.step}, {digested}, {len(found)} tensors"


def _read_hf_folder(folder: Path, problems: list[str]) -> str:
    digested = _read_files(folder, problems)
    shapes = HFFolder(folder).shapes
    if not shapes:
        problems.append("it holds no tensor")
    return f"Hugging Face folder, {digested}, {len(shapes)} tensors"


def _read_record(folder: Path, problems: list[str]) -> str:
    record = Record(folder)
    for parts in record.steps.values():
        for part in parts:
            try:
                assert part.tokens
                for layer in part.layers:
                    part.read(layer)
            except RunError as error:
                problems.append(str(error))
    if not record.steps:
        problems.append("it holds no whole step")
    return f"routing record, {len(record.steps)} steps"


def _read_files(folder: Path, problems: list[str]) -> str:
    digests = read_digests(folder)
    if digests is None:
        return f"no {DIGESTS}"
    names = files(folder)
    total = sum((folder / name).stat().st_size for name in names)
    with progress_bar("files", total) as bar:
        problems.extend(damaged_files(folder, digests, bar.update))
    return f"{len(names)} files, {total / 1e6:.1f} MB"
