"""What a run says at its end: how it went, and the commands that one may want next."""

import math
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from titan_moe.runtime.launch import Launch, default_ranks
from titan_moe.runtime.revision import CHECKOUT


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


def next_steps(
    folder: Path,
    *,
    checkpoint: Path | None,
    resumable: bool,
    steps: int,
    prompt: str,
    launch: Launch,
    environment: Mapping[str, str],
) -> str:
    """What one may want next, and below a shell command for each, on a line of its own to copy.
    They work as they stand in the folder that the run was started in.

    Args:
        folder: job.dump_folder, with the run's config.toml.
        checkpoint: its last one; None if it saved none.
        resumable: whether the run can go on from it.
        steps: training.steps of the run.
    """
    console = _console()
    commands = {}
    if checkpoint is not None:
        words = [*console, "generate", str(checkpoint), "--prompt", prompt]
        commands["see what the model writes"] = shlex.join(words)
    # On several nodes it is the cluster's own command that starts a run.
    if launch.num_nodes == 1 and checkpoint is None:
        start = _training(folder, launch, environment, ["--checkpoint.enable"])
        commands["train again and keep the model"] = start
    elif launch.num_nodes == 1 and resumable:
        longer = ["--training.steps", str(2 * steps)]
        commands["train on"] = _training(folder, launch, environment, longer)
    page = [*console, "report", "run", str(folder)]
    commands["get a page of its curves and experts"] = shlex.join(page)
    *others, last = commands
    purposes = f"{', '.join(others)}, or {last}" if others else last
    return "\n  ".join([f"next you can {purposes}:", *commands.values()])


def _training(
    folder: Path, launch: Launch, environment: Mapping[str, str], overrides: list[str]
) -> str:
    config, ranks = str(folder / "config.toml"), launch.world_size
    script = CHECKOUT / "run_train.sh"
    if not script.is_file():
        words = ["train", "--config", config, "--ranks", str(ranks), *overrides]
        return shlex.join([*_console(), *words])
    variables = {"CONFIG_FILE": config}
    if ranks != default_ranks(environment):
        variables |= {"NGPU": str(ranks)}
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    return f"{settings} {shlex.join([_from_here(script), *overrides])}"


def _console() -> list[str]:
    """titan-moe as the shell of this process finds it: run_train.sh's environment may not be the
    active one."""
    beside = Path(sys.executable).parent / "titan-moe"
    if shutil.which("titan-moe") == str(beside):
        return ["titan-moe"]
    return [_from_here(beside)] if beside.is_file() else [sys.executable, "-m", "titan_moe"]


def _from_here(path: Path) -> str:
    """Relative to the working folder if it lies in it."""
    try:
        return f"./{path.relative_to(Path.cwd())}"
    except ValueError:
        return str(path)
