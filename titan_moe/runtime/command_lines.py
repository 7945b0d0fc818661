"""Shell commands to propose to a user: they work as they stand in the working folder."""

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from titan_moe.runtime.launch import default_ranks
from titan_moe.runtime.revision import CHECKOUT


def training_command(
    folder: Path, ranks: int, environment: Mapping[str, str], overrides: Sequence[str] = ()
) -> str:
    """Start, or go on with, the run whose config.toml is in `folder`, on one machine."""
    config = str(folder / "config.toml")
    script = CHECKOUT / "run_train.sh"
    if not script.is_file():
        words = ["train", "--config", config, "--ranks", str(ranks), *overrides]
        return shlex.join([*console(), *words])
    variables = {"CONFIG_FILE": config}
    if ranks != default_ranks(environment):
        variables |= {"NGPU": str(ranks)}
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    return f"{settings} {shlex.join([_from_here(script), *overrides])}"


def console() -> list[str]:
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
