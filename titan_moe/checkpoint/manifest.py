"""manifest.json lists the contents of a checkpoint. It is written at save and verified at load.

It has a checksum of every tensor and a digest of every other file, and begins with its own digest:
no byte that matters changes unseen.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from titan_moe.checkpoint.digests import MANIFEST, damage, digest, files
from titan_moe.distributed.agreement import from_every_rank
from titan_moe.models.decoder import ADAPTER
from titan_moe.models.hf_settings import TextFormat
from titan_moe.runtime.errors import RunError, listed
from titan_moe.runtime.revision import running_code

_SEAL_BYTES = len('{"sha256": "", ') + 64


@dataclass(frozen=True)
class TensorSpec:
    """Global shape and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, shape: Iterable[int], dtype: torch.dtype) -> "TensorSpec":
        return cls(tuple(shape), str(dtype).removeprefix("torch."))

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def _code() -> dict[str, Any]:
    return {**running_code(), "torch": torch.__version__}


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint, and the program that wrote it."""

    step: int
    model_only: bool
    tensors: dict[str, TensorSpec]
    checksums: dict[str, str]
    """A checksum (see checksums.py) for every entry of `tensors`."""
    job: dict[str, Any]
    """The resolved configuration."""
    family: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    """The model's dimensions (models.hf.as_record)."""
    code: dict[str, Any] = field(default_factory=_code)
    """The code that wrote the checkpoint: folder, commit, hash, and torch's version."""
    base: str = ""
    """Digest of the base weights, which a checkpoint of adapters does not hold; empty for a whole
    model."""
    texts: TextFormat = field(default_factory=TextFormat)
    files: dict[str, str] = field(default_factory=dict)
    """Digests of all other files by name: `write_manifest` takes them."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json into a folder that has all its other files."""
    digests = {name: digest(folder / name) for name in files(folder)}
    manifest = replace(manifest, files=digests)
    content = json.dumps(asdict(manifest)).encode()[1:]
    (folder / MANIFEST).write_bytes(_seal(content) + content)


def _seal(content: bytes) -> bytes:
    """Returns the beginning of a manifest that ends with `content`."""
    return f'{{"sha256": "{sha256(content).hexdigest()}", '.encode()


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a checkpoint folder. Raises RunError when there is none, or a file of
    the folder is missing or damaged."""
    if not folder.is_dir():
        raise RunError(f"checkpoint {folder} does not exist: name a step-N folder")
    if not (folder / MANIFEST).is_file():
        raise RunError(
            f"{folder} is no checkpoint of titan_moe: it has no {MANIFEST}; "
            + (
                "a Hugging Face folder is read with checkpoint.initial_load_in_hf=true"
                if (folder / "config.json").exists()
                else "name a step-N folder that titan_moe wrote"
            )
        )
    data = (folder / MANIFEST).read_bytes()
    if data[:_SEAL_BYTES] != _seal(data[_SEAL_BYTES:]):
        line = "is damaged: it is not what its own sha256 says, or of another version of titan_moe"
        raise RunError(f"{folder / MANIFEST} {line}")
    manifest = TypeAdapter(Manifest).validate_python(json.loads(data))
    # Files that came along with imported weights are large: they are compared where they are used.
    own = [name for name in manifest.files if "/" not in name]
    if lines := damage(folder, manifest.files, MANIFEST, own):
        raise RunError(f"checkpoint {folder} is damaged or incomplete: {listed(lines)}")
    return manifest


def gather_specs(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """Returns specs of the tensors that any rank holds, the same on every rank; collective."""
    mine = {name: TensorSpec.of(t.shape, t.dtype) for name, t in tensors.items()}
    merged: dict[str, TensorSpec] = {}
    for specs in from_every_rank(lambda: mine, doing="cannot compare tensors"):
        for name, spec in specs.items():
            assert merged.setdefault(name, spec) == spec, f"ranks disagree about {name}"
    return merged


def audit(manifest: Manifest, wanted: Mapping[str, TensorSpec], parts: Iterable[str]) -> list[str]:
    """Returns the reasons why a checkpoint does not fit the tensors to load into; empty if it fits.

    Only the checkpoint's tensors whose names start with one of `parts` are compared.
    """
    parts = tuple(parts)
    stored = {name: spec for name, spec in manifest.tensors.items() if name.startswith(parts)}
    unlike = [
        f"{name} {stored[name]} (wanted {wanted[name]})"
        for name in sorted(stored.keys() & wanted.keys())
        if stored[name] != wanted[name]
    ]
    return [
        f"{kind} {listed(names)}"
        for kind, names in (
            ("it lacks", sorted(wanted.keys() - stored.keys())),
            ("the model lacks", sorted(stored.keys() - wanted.keys())),
            ("other shape or dtype:", unlike),
        )
        if names
    ]


def refuse_adapters(manifest: Manifest, folder: Path) -> None:
    """Raises RunError for a checkpoint of adapters, where a whole model is wanted."""
    if manifest.base:
        raise RunError(
            f"{folder} holds adapters, and no model: titan-moe hf merge makes one of them"
        )


def refuse_other_adapters(
    manifest: Manifest, folder: Path, job: Mapping[str, Any], *, is_own: bool
) -> None:
    """Raises RunError where a checkpoint and this configuration do not agree on adapters: one of
    them has none, or theirs differ.

    Args:
        is_own: the run goes on from it; else its weights, with adapters in a seed checkpoint, are
            those that a run begins with.
    """
    asked, had = job.get("lora", {}), manifest.job.get("lora", {})
    if not is_own:
        refuse_adapters(manifest, folder)
    is_adapted = any(ADAPTER in name for name in manifest.tensors)
    for key in ("rank", "alpha", "rank_stabilised", "targets"):
        if is_adapted and had[key] != asked[key]:
            value = "is not set" if asked[key] is None else f"is {asked[key]}"
            other = "job.dump_folder" if is_own else "checkpoint.initial_load_path"
            raise RunError(
                f"lora.{key} {value}, and {folder} has adapters of lora.{key}={had[key]}: set it "
                f"to that, or choose another {other}"
            )
    if is_own and not is_adapted and (rank := asked.get("rank")) is not None:
        raise RunError(
            f"lora.rank={rank}, and {folder} holds a whole model: name it in "
            "checkpoint.initial_load_path, and choose another job.dump_folder"
        )


def compare_checksums(manifest: Manifest, checksums: Mapping[str, str]) -> list[str]:
    """Returns names of tensors whose loaded values are not those that were saved."""
    return sorted(name for name, value in checksums.items() if manifest.checksums[name] != value)
