"""Reads all files of a checkpoint, an export or a tokenised copy, to tell whether it is as it was
written."""

from pathlib import Path

from titan_moe.checkpoint.checksums import box_sum, total_sums
from titan_moe.checkpoint.digests import MANIFEST, SUMS, damage, files, read_sums
from titan_moe.checkpoint.hf.folder import HFFolder, is_hf_folder
from titan_moe.checkpoint.manifest import compare_checksums, read_manifest
from titan_moe.checkpoint.tensors import METADATA, StoredTensors
from titan_moe.config.errors import ConfigError
from titan_moe.data.tokens import TOKENS, damaged_files
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.files import saved_steps, step_folder


def audit(*paths: Path) -> dict[str, list[str]]:
    """Read all of some step-N folders, folders of those, folders of runs, exports, or tokenised
    copies.

    Returns under "whole" a line for each folder that is as it was written, with what was read of
    it, and under "damaged" a line for each other one, with all that is damaged, missing or not
    listed. Raises ConfigError where a path is none of them.
    """
    found: dict[str, list[str]] = {"whole": [], "damaged": []}
    for path in paths:
        places = [path, *sorted(path.glob("*"))]
        steps = [step_folder(each, step) for each in places for step in saved_steps(each)]
        for folder in steps or [path]:
            try:
                found["whole"].append(f"{folder}: {_read(folder)}")
            except (RunError, OSError) as error:
                found["damaged"].append(f"{folder}: {error}")
    return found


def _read(folder: Path) -> str:
    """Returns what was read of a folder. Raises RunError where it is not as it was written."""
    if (folder / TOKENS).exists():
        if wrong := damaged_files(folder):
            raise RunError(f"wrong checksum of {', '.join(wrong)}: make the folder anew")
        return "tokenised dataset"
    if (folder / MANIFEST).exists() or (folder / METADATA).exists():
        manifest = read_manifest(folder)
        seen = _read_files(folder, manifest.files, MANIFEST)
        stored = StoredTensors(folder)
        found = total_sums(
            (chunk.name, int(box_sum(stored.read(chunk), chunk))) for chunk in stored.chunks()
        )
        if wrong := compare_checksums(manifest, found):
            raise RunError(f"wrong checksum of {', '.join(wrong)}")
        return f"checkpoint of step {manifest.step}, {seen}, {len(found)} tensors"
    if not is_hf_folder(folder):
        line = "is no checkpoint or Hugging Face folder: name a step-N folder, or that of a run"
        raise ConfigError(f"{folder} {line}")
    seen = _read_files(folder, read_sums(folder), SUMS)
    if not (shapes := HFFolder(folder).shapes):
        raise RunError("it holds no tensor")
    return f"Hugging Face folder, {seen}, {len(shapes)} tensors"


def _read_files(folder: Path, digests: dict[str, str], listing: str) -> str:
    if not (folder / listing).exists():
        return f"no {listing}"
    names = files(folder)
    if lines := damage(folder, digests, listing, names):
        raise RunError("; ".join(lines))
    size = sum((folder / name).stat().st_size for name in names)
    return f"{len(names)} files, {size / 1e6:.1f} MB"
