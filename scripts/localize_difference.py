"""Where do two runs part? The first module, tensor, expert and tokens that differ beyond rounding.

    python scripts/localize_difference.py CONFIG --baseline revision=main         # my change
    python scripts/localize_difference.py CONFIG --candidate layout=tp=2,ep=2     # another layout
    python scripts/localize_difference.py --baseline outputs/a --candidate outputs/b  # run again
    python scripts/localize_difference.py CONFIG --candidate layout=tp=2 --step 40

Sides are written as for compare_losses.py. Both are trained to find the first step whose figures
differ (or --step says it); then both make that step from the baseline's state, and everything is
captured: rows, outputs of modules, gradients, updates. The first place in causal order that differs
by more than harmless repeats of the baseline do (rows in another order, another layout) is named,
with both norms. Finished runs are trained again, from their config.toml, by this code.

Exit codes: 1 a place is named; 0 identical bits; 3 other bits, and nothing beyond rounding; 2
cannot be run, or no such thing; 4 a side failed; 130 interrupted: the same command goes on.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from titan_moe.config.errors import ConfigError
from titan_moe.runtime.failure import print_errors

if TYPE_CHECKING:
    from titan_moe.verify.experiment import Plan


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", type=Path, help="TOML file of both sides")
    parser.add_argument("--baseline", default="", help="default: the working tree")
    parser.add_argument("--candidate", default="", help="default: the working tree")
    parser.add_argument("--step", nargs="+", type=int, default=[], help="where to look")
    parser.add_argument("--steps", type=int, help="of the training; default: the configuration's")
    parser.add_argument("--ranks", type=int, help="default: the GPUs found, else 2")
    parser.add_argument("--set", default="", help="keys of both sides, as one word")
    parser.add_argument("--repeats", type=int, default=2, help="harmless captures; default: 2")
    parser.add_argument(
        "--harmless", nargs="+", default=[], metavar="LAYOUT", help="layouts of the repeats"
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/localization"))
    options = parser.parse_args(argv)
    try:
        return _run(options)
    except (ConfigError, ValueError) as error:
        print_errors(error.lines if isinstance(error, ConfigError) else [str(error)])
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from the runs that have ended")
        return 130


def _run(options: argparse.Namespace) -> int:
    from titan_moe.verify.code_trees import remove_worktrees
    from titan_moe.verify.launching import Launcher, SideError
    from titan_moe.verify.parting import part

    if any(step < 1 for step in options.step):
        raise ConfigError([f"--step {min(options.step)}: steps count from 1"])
    launcher = Launcher(options.out)
    try:
        found = part(_plan(options), launcher, options.step)
    except SideError as error:
        print_errors([str(error)])
        return 4
    finally:
        remove_worktrees(options.out / "worktrees")
    lines = [line for each in found for line in each.lines()] or ["identical bits"]
    print("\n".join(lines))
    options.out.mkdir(parents=True, exist_ok=True)
    told = [{"step": each.step, "named": each.named, "lines": each.lines()} for each in found]
    (options.out / "finding.json").write_text(json.dumps(told, indent=1), encoding="utf-8")
    if not found:
        return 0
    return 1 if any(each.named for each in found) else 3


def _plan(options: argparse.Namespace) -> "Plan":
    from titan_moe.verify.experiment import Plan, default_ranks
    from titan_moe.verify.sides import Side, existing, parse_overrides, parse_side

    config = None if options.config is None else existing(options.config, "")
    common = Side(
        config=config, ranks=options.ranks, overrides=parse_overrides(shlex.split(options.set))
    )
    baseline, candidate = (
        parse_side(text, common, default_ranks=default_ranks())
        for text in (options.baseline, options.candidate)
    )
    return Plan(
        title="",
        baseline=baseline,
        candidate=candidate,
        repeats=options.repeats,
        steps=options.steps,
        harmless=options.harmless,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
