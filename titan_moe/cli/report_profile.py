"""Show where a profiled step goes: regions, communication that nothing hides, the slowest rank.

    titan-moe report profile outputs/RUN/profile_traces/step-10

TRACE is a step's folder with the traces of all ranks (--profiling.enable_profiling writes them), or
one file. Prints a table; writes summary.json and summary.png into --out, or else beside the traces.
Exit codes: 0; 1 the files cannot be written; 2 the traces cannot be read.
"""

import argparse
from pathlib import Path

from titan_moe.cli.command import Answer, Command, add_out, make_folder, write_json
from titan_moe.config.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", type=Path)
    add_out(parser, default=None, says="a folder; default: the trace's")


def run(options: argparse.Namespace) -> Answer:
    from titan_moe.profiling.plot import draw
    from titan_moe.profiling.summary import read_profiles, summary, table
    from titan_moe.profiling.trace import TraceError

    trace = options.trace
    try:
        profiles = read_profiles(trace)
    except TraceError as error:
        raise ConfigError([str(error)]) from None
    facts = summary(profiles)
    out = make_folder(options.out or (trace if trace.is_dir() else trace.parent))
    figures, picture = out / "summary.json", out / "summary.png"
    write_json(figures, facts)
    draw(profiles, picture, f"{trace}: {facts['step_ms']:,.1f} ms a step ({facts['measured']})")
    return Answer(facts, [table(facts), "", str(figures), str(picture)])


COMMAND = Command(run, add_arguments)
