"""Checkpoints of a model that no run is around."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from titan_moe.checkpoint.checkpointer import Checkpointer
from titan_moe.config.job_config import Checkpoint
from titan_moe.models.hf import HFModel


def plain_checkpointer(
    folder: Path,
    module: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    model: HFModel | None = None,
    merge_data: Callable = lambda states: states[0],
    **keys: Any,
) -> Checkpointer:
    """One that saves into `folder`/checkpoint.

    Args:
        model: family and dimensions, for Hugging Face folders.
        merge_data: joins the data positions of all ranks.
        keys: of the [checkpoint] table.
    """
    return Checkpointer(
        Checkpoint(**{"enable": True, **keys}),
        folder,
        modules=[module],
        optimizer=optimizer,
        job_record={},
        merge_data=merge_data,
        model=model,
    )
