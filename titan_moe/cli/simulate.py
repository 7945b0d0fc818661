"""simulate step and simulate collectives: one rank, or all ranks, of a fake world."""

import argparse
from dataclasses import asdict

from titan_moe.cli.command import (
    Answer,
    Command,
    add_out_file,
    add_ranks,
    as_json,
    job_of,
    out_file,
    positive,
)


def _world_arguments(parser: argparse.ArgumentParser, *, layers: str) -> None:
    add_ranks(parser, default=8, says="ranks of the world; default: 8")
    parser.add_argument("--layers", type=positive, help=layers)
    add_out_file(parser, says="a JSON file for what is found")


def _step_arguments(parser: argparse.ArgumentParser) -> None:
    _world_arguments(parser, layers="keep only so many layers")
    parser.add_argument("--rank", type=int, default=0, help="rank to simulate; default: 0")


def step(options: argparse.Namespace) -> Answer:
    """Count what a rank sends, holds and makes in one step of a world of any size, on one CPU core.

        titan-moe simulate step --ranks 64 --config configs/qwen3/30B-A3B_64gpu.toml

    The program's own training step runs for one rank of a fake world, with all of its microbatches:
    its collectives are counted, and nothing is sent, stored or multiplied
    (titan_moe/simulate/fake_rank.py). With training stages, a step of each.

    Exit codes: 0; 1 it failed; 2 a configuration that cannot run.
    """
    from titan_moe.config.training_stages import training_stages
    from titan_moe.simulate.step import rank_step, simulate_steps

    task = rank_step(job_of(options), options.ranks, rank=options.rank, layers=options.layers)
    stages = training_stages(task[0])
    with out_file(options) as write:
        facts, *later = simulate_steps([(stage, *task[1:]) for _, stage in stages])
        data, lines = asdict(facts), [facts.in_words()]
        if later:
            data["stages"] = []
        for (first, _), found in zip(stages[1:], later, strict=True):
            data["stages"].append({"from_step": first, **asdict(found)})
            lines += ["", f"from step {first}:", found.in_words()]
        write(as_json(data))
    return Answer(data, lines)


def _collectives_arguments(parser: argparse.ArgumentParser) -> None:
    _world_arguments(parser, layers="layers of the model; default: one of each kind")
    parser.add_argument("--seq-len", type=positive, help="tokens; default: 256 or a little more")


def collectives(options: argparse.Namespace) -> Answer:
    """Show before a start that no rank waits for a collective that another one never issues.

        titan-moe simulate collectives --ranks 64 --config configs/qwen3/30B-A3B_64gpu.toml

    The program's own training step runs for every rank of a fake world, in a process each: with
    even routing, with skewed routing, with all tokens sent to one rank, with few experts that get
    any, and with a data rank that has no target. On every group all members must issue the same
    operations, of the same types and sizes; what one sends to another in an all-to-all, a send or a
    receive is what that one expects. The model is cut to the layers that show every kind, and
    sequences are short; both can be had whole. With training stages, each is run. Validation, saves
    and resumes are not run.

    Exit codes: 0; 1 members of a group differ; 2 a configuration that cannot run; 4 it failed; 70
    an error in titan_moe.
    """
    from titan_moe.config.training_stages import training_stages
    from titan_moe.simulate.collectives import simulate_collectives, smallest_task
    from titan_moe.simulate.step import rank_step

    job, *_ = rank_step(job_of(options), options.ranks)
    sizes = {"layers": options.layers, "seq_len": options.seq_len}
    tasks = [
        (first, smallest_task(stage, options.ranks, **sizes))
        for first, stage in training_stages(job)
    ]
    data, lines, differs = [], [], False
    with out_file(options) as write:
        for first, task in tasks:
            report = simulate_collectives(task)
            data.append({"from_step": first, **report.as_json(task)})
            lines += [f"from step {first}:"] * (len(tasks) > 1) + report.in_words(task)
            differs |= bool(report.findings)
        write(as_json(data))
    return Answer(data, lines, int(differs))


COMMANDS = {
    "step": Command(step, _step_arguments, overrides=True),
    "collectives": Command(collectives, _collectives_arguments, overrides=True, failed=4),
}
