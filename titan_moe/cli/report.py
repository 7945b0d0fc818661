"""report run, bench, profile, hang and batch: pages and tables about runs."""

import argparse
import os
from pathlib import Path

from titan_moe.cli.command import (
    Answer,
    Command,
    add_out,
    add_out_file,
    add_ranks,
    job_of,
    make_folder,
    out_file,
    path_of,
    positive,
    write_json,
)
from titan_moe.config.errors import ConfigError
from titan_moe.runtime.files import write_whole


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=path_of, metavar="RUN", help="its folder")
    parser.add_argument("--title", help="default: the runs' names")
    add_out(parser, default=None, says="a folder; default: the first run's")


def run(options: argparse.Namespace) -> Answer:
    """Curves, expert load and configurations of one or several runs, as a page.

        titan-moe report run outputs
        titan-moe report run outputs/a outputs/b --out outputs/report

    A run is its folder or its metrics.jsonl; it may still be going on. Writes report.html, which
    loads nothing, into --out, or else into the first run's folder.

    Exit codes: 0; 1 the report cannot be written; 2 something is no run.
    """
    from titan_moe.verify.compare.records import read_run
    from titan_moe.verify.report.pages import runs_page

    several = len(options.runs) > 1
    runs = [read_run(path, name=str(path) if several else "") for path in options.runs]
    page = _folder(options, options.runs[0]) / "report.html"
    write_whole(page, runs_page(options.title or ", ".join(each.name for each in runs), runs))
    return Answer([str(page)], [str(page)])


def bench(options: argparse.Namespace) -> Answer:
    """A card of benchmark runs: command, commit, device, routing, speed beside published figures.

        titan-moe report bench outputs/forced outputs/natural

    Figures are medians over the later half of a run's logged steps. A published row is found by
    model, number of ranks and routing. Prints the card, and writes it as card.md into --out, or
    else into the first run's folder.

    Exit codes: 0; 1 the card cannot be written; 2 something is no run.
    """
    from titan_moe.verify.compare.records import read_run
    from titan_moe.verify.report.bench import card, markdown

    cards = {str(run): card(read_run(run, name=str(run))) for run in options.runs}
    path = _folder(options, options.runs[0]) / "card.md"
    write_whole(path, page := markdown(options.title or ", ".join(cards), cards))
    return Answer(cards, [page, str(path)])


def _profile_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", type=path_of)
    add_out(parser, default=None, says="a folder; default: the trace's")


def profile(options: argparse.Namespace) -> Answer:
    """Show where a profiled step goes: regions, communication that nothing hides, the slowest rank.

        titan-moe report profile outputs/RUN/profile_traces/step-10

    TRACE is a step's folder with the traces of all ranks (--profiling.enable_profiling writes
    them), or one file. Prints a table; writes summary.json into --out, or else beside the traces.
    If the run knows its GPUs, the parts that `titan-moe plan` expects stand beside the measured
    ones, here and on the page of `titan-moe report run`.

    Exit codes: 0; 1 the files cannot be written; 2 the traces cannot be read.
    """
    from titan_moe.profiling.parts import predicted
    from titan_moe.profiling.trace import read_profiles, summary, table

    facts = summary(read_profiles(options.trace)) | {"predicted_parts": predicted(options.trace)}
    path = _folder(options, options.trace) / "summary.json"
    write_json(path, facts)
    return Answer(facts, [table(facts), "", str(path)])


def _hang_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=path_of)


def hang(options: argparse.Namespace) -> Answer:
    """Say who waited where when a run hung, and who never came.

        titan-moe report hang outputs/RUN

    FOLDER is a run's folder or a report in it (comm_traces/hang-*.json); of several the newest is
    read. Prints the findings, and for each rank its position, its last collectives and its Python
    stacks.

    Exit codes: 0; 2 there is no report.
    """
    from titan_moe.debug.hang_report import describe, read_report

    path, found = read_report(options.folder)
    return Answer(found, [str(path), *describe(found)])


def _batch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step", type=positive, default=1, help="default: 1")
    parser.add_argument("--sequences", type=positive, default=8, help="most of them; default: 8")
    says = "ranks of the run, which global_batch_size=-1 needs; default: as for titan-moe check"
    add_ranks(parser, says=says)
    add_out_file(parser, says="the page to write", required=True)


def batch(options: argparse.Namespace) -> Answer:
    """Show the sequences of a step, token by token: targets, documents, special tokens, filler.

        titan-moe report batch --config configs/debug/sft.toml --step 3 --out batch.html
        titan-moe report batch --config outputs/RUN/config.toml --out batch.html

    Reads the first sequences of the global batch, through all steps before that one, as a run of
    this configuration does with any layout; starts no ranks. The page loads nothing.

    Exit codes: 0; 1 the data ran out, or cannot be read; 2 a configuration whose data cannot be
    trained on.
    """
    from titan_moe.config.parse import resolve
    from titan_moe.data.tokenizer import load_tokenizer
    from titan_moe.runtime.launch import default_ranks
    from titan_moe.verify.report.batch import batch_page, counts, read_sequences

    job, ranks = job_of(options), options.ranks or default_ranks(os.environ)
    if job.training.global_batch_size == -1 and job.parallelism.data_ranks(ranks) is None:
        line = f"--ranks {ranks} does not fit the degrees of parallelism"
        raise ConfigError(f"{line}: name the run's, or set training.global_batch_size")
    job, tokenizer = resolve(job, ranks), load_tokenizer(job.model.tokenizer_path, job.training)
    with out_file(options) as write:
        sequences = read_sequences(job, tokenizer, options.step, options.sequences)
        write(batch_page(job, tokenizer, options.step, sequences))
    return Answer(list(map(counts, sequences)), [str(options.out)])


def _folder(options: argparse.Namespace, first: Path) -> Path:
    """Returns the folder of --out, or else the one that is read."""
    return make_folder(options.out or (first if first.is_dir() else first.parent))


COMMANDS = {
    "run": Command(run, _run_arguments),
    "bench": Command(bench, _run_arguments),
    "profile": Command(profile, _profile_arguments),
    "hang": Command(hang, _hang_arguments),
    "batch": Command(batch, _batch_arguments, overrides=True),
}
