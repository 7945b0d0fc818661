"""The last lines of a run: its loss, its files, and the commands a user may want next."""

import math
import shlex
from pathlib import Path

from titan_moe.config.job_config import Checkpoint, Training
from titan_moe.metrics.jsonl import EVENTS
from titan_moe.runtime.launch import Launch, titan_moe_command


def closing_lines(
    training: Training,
    checkpoint: Checkpoint,
    folder: Path,
    *,
    step: int,
    outcome: str,
    last_saved: int | None,
    launch: Launch,
    adapts: bool = False,
) -> list[str]:
    """Returns `outcome`, the run's files, and commands that work in the folder of the start.

    Args:
        folder: job.dump_folder, with the run's config.toml.
        step: the last step taken.
        last_saved: step of the last checkpoint; None if there is none.
        adapts: checkpoints hold adapters, which write nothing alone.
    """
    saves = folder / checkpoint.folder
    lines = [outcome, f"metrics {folder / 'metrics.jsonl'}"]
    if last_saved is not None:
        lines.append(f"checkpoints {saves}")
    if (folder / EVENTS).exists():
        lines.append(f"steps that were left out or trained again: {folder / EVENTS}")

    def command(*words: object) -> str:
        return shlex.join([*titan_moe_command(), *map(str, words)])

    commands, saved = {}, saves / f"step-{last_saved}"
    # On several nodes the cluster's own command starts a run.
    if launch.num_nodes == 1:
        start = command("train", "--config", folder / "config.toml", "--ranks", launch.world_size)
        if step < training.steps:
            commands["go on where it stopped"] = start
        elif last_saved is None:
            commands["train again and keep the model"] = f"{start} --checkpoint.enable"
    if last_saved is not None and adapts:
        merge = command("hf", "merge", saved, "--out", f"{saved}-merged")
        commands["add the adapters to their weights"] = merge
    elif last_saved is not None:
        on_stdlib = training.dataset == "stdlib"
        prompt = ["--prompt", "def " if on_stdlib else "The"]
        if training.dataset_format == "messages":
            prompt = ["--chat", "--prompt", "What is copyfile of shutil?" if on_stdlib else "Hi"]
        commands["see what the model writes"] = command("generate", saved, *prompt)
    commands["get a page of its curves and experts"] = command("report", "run", folder)
    return [*lines, "\n  ".join([f"next you can {', or '.join(commands)}:", *commands.values()])]


def outcome(step: int, loss: float, held_out: float | None, unit: str, choices: int) -> str:
    """Returns the losses after the last step, in nats as they are logged and in bits.

    Args:
        loss: mean over the last step's batch; held_out: over the validation data, if measured.
        unit: a target of the loss, such as "byte"; choices: number of different ones.
    """
    words = f"step {step}: loss {_both(loss)} per {unit}"
    if held_out is not None:
        words += f", on held-out documents {_both(held_out)}"
    return (
        f"{words}; a uniform guess is {math.log(choices):.2f} nats ({math.log2(choices):.4g} bits)"
    )


def _both(nats: float) -> str:
    return f"{nats:.2f} nats ({nats / math.log(2):.2f} bits)"
