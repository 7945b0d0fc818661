"""Check a run's configuration and data in one plain process, before any rank starts.

    titan-moe check --config FILE --ranks 16 --nodes 2 --training.steps 20

Prints the number of ranks of a node and the run's folder, which run_train.sh reads, and what of a
torchtitan file has no effect here; or all that is wrong, a line each. Exit codes: 0; 2 a
configuration or data that cannot be trained on.
"""

import argparse
import os

from titan_moe.cli.command import Answer, Command, add_ranks, job_arguments, positive
from titan_moe.config.errors import ConfigError

_CPU_RANKS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_ranks(
        parser, default=None, says="ranks of the run; default: on each node the GPUs found, else 2"
    )
    parser.add_argument("--nodes", type=positive, default=1, help="machines; default: 1")


def run(options: argparse.Namespace) -> Answer:
    from titan_moe.config.checks.data import check_vocabulary
    from titan_moe.config.parse import read_job
    from titan_moe.data.build import check_data
    from titan_moe.data.tokenizer import load_tokenizer
    from titan_moe.runtime.launch import count_gpus
    from titan_moe.train import prepare_job

    nodes = options.nodes
    ranks = options.ranks or nodes * (count_gpus(os.environ) or _CPU_RANKS)
    if ranks % nodes:
        raise ConfigError([f"--ranks {ranks} must be a multiple of --nodes {nodes}"])
    job, notes = read_job(job_arguments(options))
    job, model = prepare_job(job, ranks, os.environ)
    if problems := check_data(job.training, job.validation, job.model.tokenizer_path):
        raise ConfigError(problems)
    tokenizer = load_tokenizer(job.model.tokenizer_path)
    if problems := check_vocabulary(job, model, tokenizer.vocab_size):
        raise ConfigError(problems)
    found = {"ranks_per_node": ranks // nodes, "dump_folder": job.job.dump_folder}
    return Answer(found | {"notes": notes}, [*map(str, found.values()), *notes])


COMMAND = Command(run, add_arguments, overrides=True, ends_at_once=True)
