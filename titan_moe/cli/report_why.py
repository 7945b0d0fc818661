"""Make a step of a run again, and trace a spike of its loss or gradient to documents and experts.

    titan-moe report why outputs/RUN 1234

In this process alone, on a GPU if there is one, the steps from the nearest checkpoint of the run
up to this one are trained again, in the run's order of data. Then the step's gradient is taken
apart: by sequence, document, token, layer and expert, beside the steps before. Lastly it is made
without the worst documents, the worst expert and the worst layer. Nothing of the run is changed.
Writes why-STEP.html and why-STEP.json into --out, or else into the run's folder.

Exit codes: 0; 1 the steps cannot be made again; 2 no such run, step or argument.
"""

import argparse
from pathlib import Path

from titan_moe.cli.command import (
    Answer,
    Command,
    add_out,
    make_folder,
    not_negative,
    positive,
    write_json,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="its folder")
    parser.add_argument("step", metavar="STEP", type=positive)
    parser.add_argument(
        "--documents",
        type=positive,
        default=64,
        help="whose gradients are computed one by one, of the heaviest sequences; default: 64",
    )
    parser.add_argument(
        "--max-repeated",
        type=not_negative,
        default=1000,
        help="steps before it that may be trained again; default: 1000",
    )
    add_out(parser, default=None, says="a folder; default: the run's")


def run(options: argparse.Namespace) -> Answer:
    from titan_moe.debug.why.explain import explain
    from titan_moe.debug.why.run import find_run
    from titan_moe.debug.why.words import lines
    from titan_moe.runtime.files import write_whole
    from titan_moe.verify.report.why import why_page

    found = find_run(options.run, options.step, most_repeated=options.max_repeated)
    out = make_folder(options.out or options.run)
    explanation = explain(found, most_documents=options.documents, say=print)
    page, figures = (out / f"why-{options.step}.{suffix}" for suffix in ("html", "json"))
    write_json(figures, explanation.as_json())
    write_whole(page, why_page(explanation, found))
    return Answer(explanation.as_json(), [*lines(explanation), "", str(page), str(figures)])


COMMAND = Command(run, add_arguments)
