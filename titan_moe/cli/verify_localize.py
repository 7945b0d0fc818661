"""Find where two runs begin to differ: the first module, tensor, expert and tokens.

    titan-moe verify localize --config FILE --baseline revision=main         # my change
    titan-moe verify localize --config FILE --candidate layout=tp=2,ep=2     # another layout
    titan-moe verify localize --config FILE --candidate layout=tp=2 --step 40

A RUN is written as for verify losses. Both are trained to find the first step whose figures differ,
unless --step names it. Then both make that step from the baseline's state, and everything is
captured: sequences, outputs of modules, gradients, updates. Control runs repeat the baseline's step
with its sequences in another order or in another layout. The first place in causal order that
differs by more than they do is named, with both norms. A finished run is trained again: name its
configuration as config=outputs/a/config.toml. The output folder gets finding.json and every run.

Exit codes: 1 a place is named that differs, or that only one run has; 0 identical bits; 3 other
bits, and nothing beyond rounding; 2 cannot be run, or a wrong argument; 4 a run failed; 70 an error
in titan_moe; 130 interrupted: the same command goes on.
"""

import argparse

from titan_moe.cli import run_specs
from titan_moe.cli.command import Answer, Command, add_out, positive, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    run_specs.add_arguments(parser, repeats=2)
    parser.add_argument("--step", nargs="+", type=positive, default=[], help="where to look")
    add_out(parser, default="outputs/localization", says="default: %(default)s")


def run(options: argparse.Namespace) -> Answer:
    from titan_moe.verify.compare.bisect import bisect
    from titan_moe.verify.compare.launch import Launcher, workplace

    trial = run_specs.read_trial(options)
    launcher = Launcher(options.out)
    with workplace(options.out):
        findings = bisect(trial, launcher, options.step)
        sides = {"baseline": trial.baseline, "candidate": trial.candidate}
        code = {role: str(launcher.code(spec)) for role, spec in sides.items()}
    data = [
        {"step": each.step, "named": each.named, "lines": each.lines(), "code": code}
        for each in findings
    ]
    write_json(options.out / "finding.json", data)
    lines = [line for each in findings for line in each.lines()] or ["identical bits"]
    lines += [f"{role} ran {words}" for role, words in code.items()]
    differs = any(each.named or each.uncompared for each in findings)
    return Answer(data, lines, 1 if differs else 3 if findings else 0)


COMMAND = Command(run, add_arguments, overrides=True, resumable=True, failed=4)
