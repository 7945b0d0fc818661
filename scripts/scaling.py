"""Count what a rank sends, holds and makes in worlds of any size, on one CPU core.

    python scripts/scaling.py --ranks 64 --job.config_file configs/qwen3/30B-A3B_64gpu.toml
    python scripts/scaling.py --curve 8,64,1024,4096 --layers 4 --job.config_file FILE --png FILE

The program's own training step runs for one rank of a fake world: its collectives are counted, and
nothing is sent, stored or multiplied (titan_moe/simulate/fake_rank.py). With --ranks the step is
the config's, with all of its microbatches. With --curve a rank's batch is one microbatch in every
world, data parallelism takes up the further ranks, and the law is judged: nothing per rank grows
with the world faster than the shard that it owns; --layers cuts the model, to be quicker (torch's
FSDP cuts every parameter into as many pieces as there are ranks). Exit codes: 0; 1 where the law is
broken; 2 for a config that cannot run.
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from titan_moe.config.checks.job import check
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import load_job, resolve
from titan_moe.models.config import ModelConfig
from titan_moe.models.hf import model_of_job
from titan_moe.runtime.failure import print_errors
from titan_moe.simulate.scaling import RankFacts, measure, violations
from titan_moe.testing.process_pool import in_fresh_processes

_GPUS_OF_A_NODE = 8


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--curve", help="numbers of ranks, with commas")
    parser.add_argument("--layers", type=int, help="only the model's first")
    parser.add_argument("--rank", type=int, default=0, help="which rank to be")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    options, overrides = parser.parse_known_args(argv)
    worlds = [int(w) for w in options.curve.split(",")] if options.curve else [options.ranks]
    try:
        tasks = [_task(overrides, world, options) for world in worlds]
    except ConfigError as error:
        print_errors(error.lines)
        return 2
    # No device of this machine: what is counted is the program's, and a CPU counts it.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    curve = []
    for _, found in in_fresh_processes(measure, tasks, num_workers=1):
        print(_text(found), end="\n\n", flush=True)
        curve.append(found)
    if options.json:
        options.json.write_text(json.dumps([each.as_json() for each in curve], indent=1))
    if options.png:
        from titan_moe.simulate.scaling_plot import draw

        model = tasks[0][0].model
        tokens = curve[0].tokens
        layers = f", {tasks[0][1].num_layers} layers"
        title = f"{model.name} {model.flavor}{layers}: one rank, {tokens:,} tokens a step"
        draw(curve, options.png, title)
    broken = violations(curve) if len(curve) > 1 else []
    print_errors(broken)
    if len(curve) > 1 and not broken:
        print("nothing per rank grows with the world faster than the shard that it owns")
    return 1 if broken else 0


def _task(
    overrides: list[str], world: int, options: argparse.Namespace
) -> tuple[JobConfig, ModelConfig, int, int]:
    job, rank = load_job(overrides), options.rank
    config = model_of_job(job.model)
    if options.layers:
        config = replace(config, num_layers=min(options.layers, config.num_layers))
    if options.curve:
        training = job.training.model_copy(update={"global_batch_size": -1})
        job = job.model_copy(update={"training": training})
    problems = check(job, config, world, num_gpus=_GPUS_OF_A_NODE)
    if not 0 <= rank < world:
        problems.append(f"--rank {rank}: there are {world} ranks: choose one below")
    if problems:
        raise ConfigError(problems)
    return resolve(job, world), config, world, rank


def _text(facts: RankFacts) -> str:
    degrees = " ".join(f"{axis}={size}" for axis, size in facts.degrees.items() if size > 1)
    lines = [
        f"{facts.world_size:,} ranks ({degrees}): {facts.tokens:,} tokens a step and rank in "
        f"{facts.num_microbatches} microbatch(es)",
        f"{'axis':<16}{'operation':<18}{'calls':>8}{'GB sent':>12}",
    ]
    total = 0.0
    for axis, ops in facts.traffic.items():
        for op, (calls, sent) in ops.items():
            lines.append(f"{axis:<16}{op:<18}{calls:>8,}{sent / 1e9:>12.4f}")
            total += sent
    return "\n".join(
        [
            *lines,
            f"{'all':<34}{'':>8}{total / 1e9:>12.4f}",
            f"groups of the rank {facts.num_groups} besides the world's, made by "
            f"{facts.new_group_calls} calls; groups and meshes keep "
            f"{facts.metadata_bytes / 1e6:.2f} MB; CPU time {1e3 * facts.mesh_seconds:.0f} ms, and "
            f"{facts.layout_seconds:.2f} s to lay out the model",
            f"own shard {facts.parameter_bytes / 1e9:.3f} GB of weights, "
            f"{facts.optimizer_bytes / 1e9:.3f} GB of optimizer state",
            f"host memory without weights {facts.rss_built / 2**20:.0f} MiB, "
            f"{facts.rss_import / 2**20:.0f} of it imports; counted in {facts.paper_seconds:.0f} s",
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
