"""A running model from and to Hugging Face folders."""

import logging
import time
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.checkpoint.agreement import on_every_rank
from titan_moe.checkpoint.hf.assets import asset_folders, write_assets
from titan_moe.checkpoint.hf.folder import HFFolder
from titan_moe.checkpoint.hf.names import Shapes, find
from titan_moe.checkpoint.hf.pieces import Box
from titan_moe.checkpoint.hf.progress import Progress, speed_line
from titan_moe.checkpoint.hf.reading import fill_tensors
from titan_moe.checkpoint.hf.writing import export
from titan_moe.distributed.dtensor import local_part, local_slices
from titan_moe.models.hf import HFModel, differences, model_of
from titan_moe.runtime.errors import RunError

logger = logging.getLogger(__name__)


def load_hf(folder: Path, model: HFModel, tensors: Mapping[str, Tensor], shapes: Shapes) -> None:
    """Fill a model's tensors, each rank its own parts; collective, but nothing is exchanged.

    Args:
        tensors: this rank's, by our names.
        shapes: of all ranks' tensors, whole.

    Raises RunError in one line when config.json or tensors are not those of the model.
    """
    started = time.perf_counter()
    doing = f"cannot load {folder}"

    def load() -> int:
        refuse_other_dimensions(model, folder)
        with HFFolder(folder) as opened:
            found = find(model, opened, shapes)
            total = sum(
                prod(local_part(tensor).shape) * tensor.element_size()
                for name, tensor in tensors.items()
                if name in found
            )
            with Progress("import", total) as progress:
                fill_tensors(tensors, found, opened, progress.advance)
            return opened.num_bytes

    num_bytes = on_every_rank(load, doing=doing)
    if dist.get_rank() == 0:
        logger.info(speed_line(f"loaded {folder}", num_bytes, started))


def refuse_other_dimensions(model: HFModel, folder: Path) -> None:
    """Raises RunError when a folder's config.json is that of another model."""
    theirs = model_of(folder)
    if theirs.family != model.family:
        raise RunError(
            f"{folder} holds a model of the family {theirs.family}: set model.name={theirs.family}"
        )
    if lines := differences(model.config, theirs.config):
        raise RunError(
            f"{folder} does not fit the model: {', '.join(lines)}; model.flavor=hf with "
            f"model.hf_assets_path={folder} takes its dimensions"
        )


class LiveSource:
    """What this rank's parts of a model hold (writing.Source)."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def boxes(self) -> dict[str, list[Box]]:
        """One of each tensor."""
        return {name: [local_slices(tensor)] for name, tensor in self._tensors.items()}

    def read(self, name: str, box: Box) -> Tensor:
        """The part that this rank holds, sharing its memory."""
        return local_part(self._tensors[name].detach())

    def finish(self) -> None:
        """Memory is trusted."""


def save_hf(
    target: Path,
    model: HFModel,
    tensors: Mapping[str, Tensor],
    shapes: Shapes,
    *,
    dtype: torch.dtype,
    job_record: Mapping[str, Any],
) -> None:
    """Export a running model; collective. `writing.export` says what is raised."""
    started = time.perf_counter()
    folders: Sequence[Path] = asset_folders(None, job_record)
    num_bytes = export(
        model,
        shapes,
        LiveSource(tensors),
        target,
        dtype=dtype,
        write_assets=lambda aside: write_assets(model, folders, dtype, aside),
    )
    if dist.get_rank() == 0:
        logger.info(speed_line(f"exported {target}", num_bytes, started))
