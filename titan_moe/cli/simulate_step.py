"""Count what a rank sends, holds and makes in one step of a world of any size, on one CPU core.

    titan-moe simulate step --ranks 64 --config configs/qwen3/30B-A3B_64gpu.toml

The program's own training step runs for one rank of a fake world, with all of its microbatches:
its collectives are counted, and nothing is sent, stored or multiplied
(titan_moe/simulate/fake_rank.py). With training stages, a step of each.
Exit codes: 0; 1 it failed; 2 a configuration that cannot run.
"""

import argparse

from titan_moe.cli.command import Answer, Command, add_one_world, job_arguments, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_one_world(parser, layers="only the model's first", out="a JSON file for the figures")
    parser.add_argument("--rank", type=int, default=0, help="which of the ranks; default: 0")


def run(options: argparse.Namespace) -> Answer:
    from titan_moe.config.parse import load_job
    from titan_moe.config.stages import stage_jobs
    from titan_moe.simulate.step import rank_step, simulate_steps

    job = load_job(job_arguments(options))
    task = rank_step(job, options.ranks, rank=options.rank, layers=options.layers)
    stages = stage_jobs(task[0])
    facts, *later = simulate_steps([(stage, *task[1:]) for _, stage in stages])
    data, lines = facts.as_json(), [facts.in_words()]
    if later:
        data["stages"] = []
    for (step, _), found in zip(stages[1:], later, strict=True):
        data["stages"].append({"from_step": step, **found.as_json()})
        lines += ["", f"from step {step}:", found.in_words()]
    write_json(options.out, data)
    return Answer(data, lines)


COMMAND = Command(run, add_arguments, overrides=True)
