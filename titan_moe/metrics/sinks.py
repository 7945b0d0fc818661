"""Where metrics go: every sink gets the same numbers at every logged step. The console is one more,
which also moves in between: metrics.console."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Metrics
from titan_moe.metrics.jsonl import JsonLines
from titan_moe.metrics.services import Background, MLflow, Sink, TensorBoard, WeightsAndBiases


def missing_packages(config: Metrics) -> list[str]:
    """One line per sink that is switched on but not installed."""
    optional = {
        "enable_tensorboard": (config.enable_tensorboard, "tensorboard", "tensorboard"),
        "enable_wandb": (config.enable_wandb, "wandb", "wandb"),
        "enable_mlflow": (config.enable_mlflow, "mlflow", "mlflow-skinny"),
    }
    return [
        f"metrics.{key} = true needs the package {package}: install it, or set the key to false"
        for key, (enabled, module, package) in optional.items()
        if enabled and find_spec(module) is None
    ]


def build_sinks(
    config: Metrics, dump_folder: Path, job: Mapping[str, Any], *, resume_step: int
) -> list[Sink]:
    """The files, and what else is switched on, of the one rank that logs.

    Args:
        dump_folder: metrics.jsonl and what the other sinks write lie in it.
        job: the whole configuration, which services show beside a run.
        resume_step: the step it starts after; 0 for a fresh run.

    Raises:
        ConfigError: a sink is switched on that is not installed.
    """
    if lines := missing_packages(config):
        raise ConfigError(lines)
    sinks: list[Sink] = [JsonLines(dump_folder / "metrics.jsonl", resume_step=resume_step)]
    tb_folder = dump_folder / config.save_tb_folder
    optional: dict[str, tuple[bool, Callable[[], Sink]]] = {
        "TensorBoard": (
            config.enable_tensorboard,
            lambda: TensorBoard(tb_folder, resume_step=resume_step),
        ),
        "Weights & Biases": (
            config.enable_wandb,
            lambda: WeightsAndBiases(dump_folder, job, resume_step=resume_step),
        ),
        "MLflow": (
            config.enable_mlflow,
            lambda: MLflow(dump_folder, job, resume_step=resume_step),
        ),
    }
    return sinks + [Background(name, make) for name, (on, make) in optional.items() if on]
