"""Show where a profiled step goes: regions, communication that nothing hides, the slowest rank.

    python scripts/profile_summary.py outputs/RUN/profile_traces/step-10 [--json FILE] [--png FILE]

TRACE is a step's folder with the traces of all ranks (--profiling.enable_profiling writes them), or
one file. Prints a table; beside the traces it writes summary.json and summary.png, unless told
other places. Exit codes: 0; 2 where the traces cannot be read.
"""

import argparse
import json
import sys
from pathlib import Path

from titan_moe.profiling.plot import draw
from titan_moe.profiling.summary import read_profiles, summary, table
from titan_moe.profiling.trace import TraceError
from titan_moe.runtime.failure import print_errors


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--png", type=Path, help="where to draw the picture")
    options = parser.parse_args(argv)
    try:
        profiles = read_profiles(options.trace)
    except TraceError as error:
        print_errors([str(error)])
        return 2
    facts = summary(profiles)
    folder = options.trace if options.trace.is_dir() else options.trace.parent
    figures, picture = (
        options.json or folder / "summary.json",
        options.png or folder / "summary.png",
    )
    figures.write_text(json.dumps(facts, indent=1), encoding="utf-8")
    title = f"{options.trace}: {facts['step_ms']:,.1f} ms a step ({facts['measured']})"
    draw(profiles, picture, title)
    print(table(facts))
    print(f"\n{figures}\n{picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
