"""Where metrics go: every sink gets the same numbers at every logged step. The console is one more,
which also moves in between: metrics.console."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Metrics
from titan_moe.metrics.jsonl import JsonLines


class Sink(Protocol):
    """Takes the metrics of each logged step, in ascending order of steps, until it is closed."""

    def write(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """TensorBoard scalars; what a resumed run repeats is hidden."""

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        # Imported here: it costs a second, and most runs do not ask for it.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A W&B run; its project and mode follow W&B's own environment variables."""

    def __init__(self, folder: Path) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "titan_moe"), dir=str(folder)
        )

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


def missing_packages(config: Metrics) -> list[str]:
    """One line per sink that is switched on but not installed."""
    optional = {
        "enable_tensorboard": (config.enable_tensorboard, "tensorboard"),
        "enable_wandb": (config.enable_wandb, "wandb"),
    }
    return [
        f"metrics.{key} = true needs the package {package}: install it, or set the key to false"
        for key, (enabled, package) in optional.items()
        if enabled and find_spec(package) is None
    ]


def build_sinks(config: Metrics, dump_folder: Path, *, resume_step: int) -> list[Sink]:
    """The files, and what else is switched on, of the one rank that logs.

    Args:
        dump_folder: metrics.jsonl and the TensorBoard folder lie in it.
        resume_step: the step it starts after; 0 for a fresh run.

    Raises:
        ConfigError: a sink is switched on that is not installed.
    """
    if lines := missing_packages(config):
        raise ConfigError(lines)
    sinks: list[Sink] = [JsonLines(dump_folder / "metrics.jsonl", resume_step=resume_step)]
    if config.enable_tensorboard:
        sinks.append(TensorBoard(dump_folder / config.save_tb_folder, resume_step=resume_step))
    if config.enable_wandb:
        sinks.append(WeightsAndBiases(dump_folder))
    return sinks
