"""Show before a start that no rank waits for a collective that another one never issues.

    titan-moe simulate collectives --ranks 64 --config configs/qwen3/30B-A3B_64gpu.toml

The program's own training step runs for every rank of a fake world, in a process each: with even
routing, with skewed routing, with all tokens sent to one rank, with few experts that get any, and
with a data rank that has no target. On every group all members must issue the same operations, of
the same types and sizes; what one sends to another in an all-to-all, a send or a receive is what
that one expects. The model is cut to the layers that show every kind, and sequences are short; both
can be had whole. With training stages, each is run. Validation, saves and resumes are not run.

Exit codes: 0; 1 members of a group part; 2 a configuration that cannot run; 4 it failed; 70 an
error in titan_moe.
"""

import argparse

from titan_moe.cli.command import (
    Answer,
    Command,
    add_one_world,
    job_arguments,
    positive,
    write_json,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    layers = "of the model; default: one of each kind"
    add_one_world(parser, layers=layers, out="a JSON file for what is found")
    parser.add_argument("--seq-len", type=positive, help="default: 256 or a little more")


def run(options: argparse.Namespace) -> Answer:
    from titan_moe.config.parse import load_job
    from titan_moe.config.stages import stage_jobs
    from titan_moe.simulate.collectives import simulate_collectives, smallest_task
    from titan_moe.simulate.step import rank_step

    job, *_ = rank_step(load_job(job_arguments(options)), options.ranks)
    sizes = {"layers": options.layers, "seq_len": options.seq_len}
    tasks = [
        (step, smallest_task(stage, options.ranks, **sizes)) for step, stage in stage_jobs(job)
    ]
    data, lines, parts = [], [], False
    for step, task in tasks:
        report = simulate_collectives(task)
        data.append({"from_step": step, **report.as_json(task)})
        lines += [f"from step {step}:"] * (len(tasks) > 1) + report.in_words(task)
        parts |= bool(report.findings)
    write_json(options.out, data)
    return Answer(data, lines, int(parts))


COMMAND = Command(run, add_arguments, overrides=True, failed=4)
