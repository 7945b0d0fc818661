"""Show where a profiled step goes: regions, communication that nothing hides, the slowest rank.

    titan-moe report profile outputs/RUN/profile_traces/step-10

TRACE is a step's folder with the traces of all ranks (--profiling.enable_profiling writes them), or
one file. Prints a table; writes summary.json into --out, or else beside the traces.
Exit codes: 0; 1 the files cannot be written; 2 the traces cannot be read.
"""

import argparse
from pathlib import Path

from titan_moe.cli.command import Answer, Command, add_out, make_folder, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", type=Path)
    add_out(parser, default=None, says="a folder; default: the trace's")


def run(options: argparse.Namespace) -> Answer:
    from titan_moe.profiling.trace import read_profiles, summary, table

    trace = options.trace
    facts = summary(read_profiles(trace))
    out = make_folder(options.out or (trace if trace.is_dir() else trace.parent))
    write_json(out / "summary.json", facts)
    return Answer(facts, [table(facts), "", str(out / "summary.json")])


COMMAND = Command(run, add_arguments)
