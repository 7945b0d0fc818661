"""The end of a save, in the step or in the background, and the memory that the latter copies to."""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager

from titan_moe.checkpoint import folder as folders
from titan_moe.checkpoint.manifest import Manifest, write_manifest
from titan_moe.checkpoint.tensors import one_line
from titan_moe.distributed.agreement import on_every_rank
from titan_moe.runtime.errors import RunError


class Save(NamedTuple):
    """A save that DCP has begun."""

    step: int
    target: Path
    aside: Path
    """The folder that becomes `target`."""
    began: float
    """The start, on the clock of time.perf_counter."""
    future: Future[Any]

    def wait(self, limit: int) -> None:
        """Wait until it has ended on every rank, `limit` seconds at most; collective. Raises
        RunError on all ranks when it has failed on one."""
        doing = f"cannot save checkpoint {self.target}"

        def wait() -> None:
            try:
                with one_line(doing):
                    self.future.result(limit)
            except TimeoutError:
                raise RunError(
                    f"{doing}: it is not on disk after checkpoint.save_timeout_seconds={limit}: "
                    "raise it if the disk is only slow"
                ) from None

        try:
            on_every_rank(wait, doing=doing)
        except Exception:
            # A thread that still writes could make it visible while it is removed.
            if dist.get_rank() == 0 and self.future.done():
                folders.abandon(self.aside)
            raise


def publish(
    aside: Path, target: Path, manifest: Manifest, names: Iterable[str], keep_latest_k: int
) -> None:
    """Rank 0's end of a save: add the manifest to a folder in which all ranks' files are on disk,
    and make it visible.

    Args:
        names: the ranks' files.

    Raises RunError when one of them is not there, and OSError.
    """
    for name in names:
        if not (aside / name).is_file():
            raise RunError(
                f"checkpoint {aside} is incomplete: {name} is missing: it was removed, or "
                "job.dump_folder is not one folder for all nodes"
            )
    write_manifest(aside, manifest)
    folders.commit(aside, target)
    folders.keep_latest(target.parent, count=keep_latest_k, newest=manifest.step)


class Stager(AsyncStager):
    """Copies tensors to the host, into memory that is kept from one save to the next.

    DCP's DefaultStager frees that memory after each save in torch 2.11, and then cannot copy again.

    Args:
        pinned: page-lock the memory, so that a GPU copies at its full rate.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._copies: dict[str, Tensor] = {}

    def stage(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the copies when they are complete; the next call overwrites them."""
        kept, self._copies = self._copies, {}
        for name, tensor in state_dict.items():
            copy = kept.get(name)
            if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                copy = torch.empty_like(tensor, device="cpu", pin_memory=self._pinned)
            self._copies[name] = copy.copy_(tensor, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self._copies

    def synchronize_staging(self) -> None:
        """Does nothing: copies are complete when `stage` returns."""

    def close(self) -> None:
        """Does nothing: DCP closes the stagers that it makes itself."""
