"""Reads every byte of a checkpoint or an export, to tell whether it is as it was written."""

from pathlib import Path
from typing import NamedTuple

from titan_moe.checkpoint.checksums import box_sum, total_sums
from titan_moe.checkpoint.digests import DIGESTS, damaged_files, files, read_digests
from titan_moe.checkpoint.hf.folder import HFFolder, is_hf_folder
from titan_moe.checkpoint.manifest import MANIFEST, compare_checksums, read_manifest
from titan_moe.checkpoint.tensors import METADATA, StoredTensors
from titan_moe.config.errors import ConfigError
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.files import saved_steps, step_folder


class Audit(NamedTuple):
    """The findings about one or more folders."""

    whole: list[str]
    """One line per folder that is as it was written, with what was read of it."""
    problems: list[str]
    """One line per thing that is damaged, missing or not listed."""


def audit(path: Path) -> Audit:
    """Read all of a step-N folder, of a folder of those, or of an export.

    Raises ConfigError where it is none of them.
    """
    result = Audit([], [])
    for folder in [step_folder(path, step) for step in saved_steps(path)] or [path]:
        try:
            seen, problems = _read(folder)
        except (RunError, OSError) as error:
            seen, problems = "", [str(error)]
        result.problems.extend(f"{folder}: {line}" for line in problems)
        if not problems:
            result.whole.append(f"{folder}: {seen}")
    return result


def _read(folder: Path) -> tuple[str, list[str]]:
    """Returns what was read of a folder, and its problems."""
    is_checkpoint = (folder / MANIFEST).exists() or (folder / METADATA).exists()
    if not is_checkpoint and not is_hf_folder(folder):
        line = "is no checkpoint or Hugging Face folder: name a step-N folder, or the folder of"
        raise ConfigError(f"{folder} {line} several")
    digests = read_digests(folder)
    problems = [] if digests is None else damaged_files(folder, digests)
    names = files(folder)
    size = sum((folder / name).stat().st_size for name in names)
    seen = f"{len(names)} files, {size / 1e6:.1f} MB" if digests else f"no {DIGESTS}"
    if not is_checkpoint:
        shapes = HFFolder(folder).shapes
        problems += [] if shapes else ["it holds no tensor"]
        return f"Hugging Face folder, {seen}, {len(shapes)} tensors", problems
    manifest = read_manifest(folder)
    if problems:
        return seen, problems
    stored = StoredTensors(folder)
    found = total_sums(
        (chunk.name, box_sum(stored.read(chunk), chunk)) for chunk in stored.chunks()
    )
    if wrong := compare_checksums(manifest, found):
        problems = [f"wrong checksum of {', '.join(wrong)}"]
    return f"checkpoint of step {manifest.step}, {seen}, {len(found)} tensors", problems
