"""What a run says at its end: how it went, and the commands that one may want next."""

import math
import shlex
from collections.abc import Mapping
from pathlib import Path

from titan_moe.config.job_config import Checkpoint, LRScheduler, Training
from titan_moe.metrics.jsonl import EVENTS
from titan_moe.runtime.command_lines import console, training_command
from titan_moe.runtime.launch import Launch


def closing_lines(
    training: Training,
    checkpoint: Checkpoint,
    schedule: LRScheduler,
    folder: Path,
    *,
    step: int,
    outcome: str,
    last_saved: int | None,
    launch: Launch,
    environment: Mapping[str, str],
) -> list[str]:
    """`outcome`, where everything is, and what one may do next.

    Args:
        folder: job.dump_folder, with the run's config.toml.
        step: the last one taken.
        last_saved: step of the last checkpoint; None if there is none.
    """
    stopped, saves = step < training.steps, folder / checkpoint.folder
    lines = [outcome, f"metrics {folder / 'metrics.jsonl'}"]
    if not stopped:
        lines.append(f"curves  {folder / 'curves.png'}")
    if last_saved is not None:
        lines.append(f"checkpoints {saves}")
    if (folder / EVENTS).exists():
        lines.append(f"steps that were left out or trained again: {folder / EVENTS}")
    following = next_steps(
        folder,
        checkpoint=None if last_saved is None else saves / f"step-{last_saved}",
        stopped=stopped,
        resumable=not checkpoint.last_save_model_only,
        longer=longer(training.steps, schedule),
        prompt="def " if training.dataset == "stdlib" else "The",
        launch=launch,
        environment=environment,
    )
    return [*lines, following]


def outcome(step: int, loss: float, held_out: float | None, unit: str, choices: int) -> str:
    """The losses after the last step, in nats as they are logged and in bits.

    Args:
        loss: of that step's own batch; held_out: of the validation data, if it was measured.
        unit: what the loss is per; choices: among how many of them a uniform guess chooses.
    """
    words = f"step {step}: loss {_both(loss)} per {unit}"
    if held_out is not None:
        words += f", on held-out documents {_both(held_out)}"
    return (
        f"{words}; a uniform guess is {math.log(choices):.2f} nats ({math.log2(choices):.4g} bits)"
    )


def _both(nats: float) -> str:
    return f"{nats:.2f} nats ({nats / math.log(2):.2f} bits)"


def longer(steps: int, schedule: LRScheduler) -> list[str]:
    """Arguments to train on to twice the steps at the rate that the schedule has ended with; none
    where that is 0, with which nothing would be learnt."""
    decays = schedule.decay_ratio != 0 and steps > schedule.warmup_steps
    if decays and not schedule.min_lr_factor and (schedule.total_steps or 0) <= steps:
        return []
    words = ["--training.steps", str(2 * steps)]
    if decays and schedule.total_steps is None:
        words += ["--lr_scheduler.total_steps", str(steps)]
    return words


def next_steps(
    folder: Path,
    *,
    checkpoint: Path | None,
    stopped: bool,
    resumable: bool,
    longer: list[str],
    prompt: str,
    launch: Launch,
    environment: Mapping[str, str],
) -> str:
    """What one may want next, and below a shell command for each, on a line of its own to copy.
    They work as they stand in the folder that the run was started in.

    Args:
        folder: job.dump_folder, with the run's config.toml.
        checkpoint: its last one; None if it saved none.
        stopped: before its last step, saved.
        resumable: whether the run can go on after its last step.
        longer: arguments that let the run go on after its last step; empty: it cannot.
    """
    commands, ranks = {}, launch.world_size
    # On several nodes it is the cluster's own command that starts a run.
    alone = launch.num_nodes == 1
    if stopped and alone:
        commands["go on where it stopped"] = training_command(folder, ranks, environment)
    if checkpoint is not None:
        words = [*console(), "generate", str(checkpoint), "--prompt", prompt]
        commands["see what the model writes"] = shlex.join(words)
    if alone and checkpoint is None:
        start = training_command(folder, ranks, environment, ["--checkpoint.enable"])
        commands["train again and keep the model"] = start
    elif alone and resumable and longer and not stopped:
        commands["train on"] = training_command(folder, ranks, environment, longer)
    page = [*console(), "report", "run", str(folder)]
    commands["get a page of its curves and experts"] = shlex.join(page)
    *others, last = commands
    purposes = f"{', '.join(others)}, or {last}" if others else last
    return "\n  ".join([f"next you can {purposes}:", *commands.values()])
