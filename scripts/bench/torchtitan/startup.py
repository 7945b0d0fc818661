"""Seconds from the command to the end of the default run's first step.

    python -m scripts.bench.torchtitan.startup --repeats 5

Three commands take turns:

- ./run_train.sh as a user starts it, until its first step's line is on the screen;
- the torchrun job that it starts, until the same line;
- a torchrun job of as many ranks that only imports torch, starts gloo, and imports what FSDP2 and
  torch.optim import themselves (bare_rank.py): torch's own start, which no program can go without.

`python -X importtime -m titan_moe train ...` tells where the imports go.
"""

import statistics
import sys
import tempfile
from collections.abc import Sequence

from tqdm import tqdm

from scripts.bench.measure import (
    REPO,
    TRAIN,
    describe,
    options,
    print_facts,
    print_table,
    run_job,
    torchrun,
    write_json,
)
from scripts.bench.torchtitan.runs import bare_start

_CONFIG = REPO / "configs/debug/default.toml"
_RANKS = 2
_GOAL_SECONDS = 1.5
_ENVIRONMENT = {"NGPU": str(_RANKS), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def main() -> None:
    arguments = options(__doc__, repeats=5).parse_args()
    job = [*torchrun(_RANKS), *TRAIN, "--job.config_file", str(_CONFIG)]
    rounds = []
    for _ in tqdm(range(arguments.repeats), unit="round"):
        start = bare_start(_RANKS)
        rounds.append(
            {
                "torch and gloo": start.torch,
                "and FSDP2": start.fsdp,
                "torchrun -m titan_moe train": first_step(job),
                "./run_train.sh": first_step(["./run_train.sh"]),
            }
        )
    print_facts(describe() | {"ranks": _RANKS})
    heads = ["", "seconds", "min", "max"]
    print_table(heads, [[name, *_figures([each[name] for each in rounds])] for name in rounds[0]])
    title = f"beyond torch's own start (goal: at most {_GOAL_SECONDS} s)"
    print_table(heads, [[name, *_figures(each)] for name, each in beyond(rounds).items()], title)
    write_json(arguments.json, {"rounds": rounds})


def first_step(command: Sequence[str]) -> float:
    """Seconds until the first step's line; the job ends there."""
    found = []

    def read(line: str, seconds: float, pid: int) -> bool:
        if " step " in line and "  loss " in line:
            found.append(seconds)
        return bool(found)

    with tempfile.TemporaryDirectory() as folder:
        run_job([*command, "--job.dump_folder", folder], _ENVIRONMENT, read)
    if not found:
        sys.exit(f"{' '.join(command)} ended before its first step")
    return found[0]


def beyond(rounds: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """What each of both commands takes beyond torch's own start, round by round."""
    bare = "and FSDP2"
    commands = [name for name in rounds[0] if "train" in name]
    return {name: [each[name] - each[bare] for each in rounds] for name in commands}


def _figures(seconds: Sequence[float]) -> list[str]:
    return [f"{each:.2f}" for each in (statistics.median(seconds), min(seconds), max(seconds))]


if __name__ == "__main__":
    main()
