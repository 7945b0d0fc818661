"""Is it still the same training? Compares two runs and gives a verdict.

    titan-moe verify losses --config FILE --baseline revision=main           # my change
    titan-moe verify losses --config FILE --candidate layout=tp=2,ep=2       # another layout
    titan-moe verify losses --config FILE --candidate "--optimizer.lr 1e-3"  # any key
    titan-moe verify losses --baseline outputs/a --candidate outputs/b       # finished runs
    titan-moe verify losses ... --controls outputs/c outputs/d outputs/e outputs/f
    titan-moe verify losses ... --tolerance loss=1e-5,grad_norm=1e-4
    titan-moe verify losses --baseline tests/goldens/qwen3                   # a golden file
    titan-moe verify losses --config FILE --update-golden tests/goldens/mine --reason "..."

A RUN is "revision=REV config=FILE ranks=N layout=AXIS=N,... --table.key value ...", where a word
that is left out is taken from the command's other options; or the folder of a finished run; or a
golden. --table.key value outside of a RUN is for both. Each is trained by the run_train.sh of its
own code, from one seed checkpoint. Where their bits differ, control runs measure how much rounding
alone changes: the baseline again, with its sequences in another order or in another layout. The
output folder gets report.html, comparison.json and every run. --max-slowdown trains both runs
three times in turn. With --pin-routing candidate and control runs are trained once more with the
baseline's routes, and the verdict is on these.

Exit codes: 0 identical bits; 3 inside the noise band or a given tolerance; 1 different; 6 the
curves pass, but the candidate is too slow or too large; 5 not identical, and no control runs to
compare with, or a cost that cannot be told from noise; 2 cannot be compared, or a wrong argument; 4
a run failed; 70 an error in titan_moe; 130 interrupted: the same command goes on.
"""

import argparse

from titan_moe.cli import run_specs
from titan_moe.cli.command import Answer, Command, add_out, path_of
from titan_moe.config.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    run_specs.add_arguments(parser, repeats=24)
    for option, says in (("--max-slowdown", "time per step"), ("--max-memory-growth", "memory")):
        says = f"largest growth of {says}; 0.05 is 5 %%"
        parser.add_argument(option, type=float, metavar="SHARE", help=says)
    parser.add_argument(
        "--controls",
        nargs="+",
        type=path_of,
        default=[],
        metavar="FOLDER",
        help="finished control runs of the baseline",
    )
    parser.add_argument(
        "--tolerance",
        type=_tolerance,
        metavar="loss=SHARE,grad_norm=SHARE",
        help="largest relative differences; they judge in place of control runs",
    )
    add_out(parser, default="outputs/comparison", says="default: %(default)s")
    says = "start without a seed checkpoint: checksums of initial weights must agree"
    parser.add_argument("--no-seed", dest="seed", action="store_false", help=says)
    parser.add_argument(
        "--pin-routing",
        action="store_true",
        help="compare a second time, all runs with the baseline's routes; that verdict counts",
    )
    parser.add_argument("--update-golden", type=path_of, metavar="FOLDER")
    parser.add_argument("--reason", default="", help="why the golden changes")


def _tolerance(text: str) -> dict[str, float]:
    """Reads "loss=1e-5,grad_norm=1e-4". Raises ConfigError."""
    try:
        pairs = [part.split("=") for part in text.split(",")]
        found = {quantity.strip(): float(share) for quantity, share in pairs}
    except ValueError:
        found = {}
    named = found.keys() <= {"loss", "grad_norm"}
    twice = len(found) < text.count("=")
    if twice or not (found and named and all(0 < share < 1 for share in found.values())):
        raise ConfigError(
            f"--tolerance {text}: it names shares above 0 and below 1 of loss, grad_norm or both: "
            "write loss=1e-5,grad_norm=1e-4"
        )
    return found


def run(options: argparse.Namespace) -> Answer:
    from titan_moe.verify.compare.launch import Launcher, workplace
    from titan_moe.verify.compare.runner import compare, update_golden
    from titan_moe.verify.report.pages import write_comparison

    keys = ("max_slowdown", "max_memory_growth", "seed", "pin_routing", "controls", "tolerance")
    if options.controls or options.tolerance:
        options.repeats = 0  # Nothing is trained to judge.
    trial = run_specs.read_trial(options, **{key: getattr(options, key) for key in keys})
    launcher = Launcher(options.out)
    with workplace(options.out):
        if options.update_golden is not None:
            path = update_golden(trial, launcher, options.update_golden, options.reason, print)
            return Answer({"golden": str(path)}, [f"golden: {path}"])
        comparison = compare(trial, launcher)
    files = [str(path) for path in write_comparison(comparison, options.out)]
    found = {**comparison.as_json(), "files": files}
    return Answer(found, [*comparison.lines(), *files], comparison.outcome.exit_code)


COMMAND = Command(run, add_arguments, overrides=True, resumable=True, failed=4)
