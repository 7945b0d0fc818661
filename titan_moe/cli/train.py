"""Train a model: all keys, after this page.

    titan-moe train --config qwen3/debugmodel_moe --training.steps 20    one process
    titan-moe train --config FILE --ranks 8                              a process per rank
    torchrun --nproc-per-node 8 -m titan_moe train --config FILE         the same, by hand

--config takes a file, or the name of a configuration that comes with titan_moe. With --ranks the
configuration and its data are checked, then torchrun starts the ranks of this machine, and one line
says why a run failed. --ranks without a number: the GPUs found, else 2 processes. On several
machines --ranks counts all of them, and each gets --nodes N --node-rank I --endpoint HOST:PORT, an
address of machine 0. ./run_train.sh of a checkout is --ranks in the environment that it makes.

Exit codes: 0; 1 a run that failed; 2 a configuration that cannot run; 130 or 143 interrupted.
"""

import argparse
import os
import sys
from pathlib import Path

from titan_moe.cli.command import Answer, Command, job_arguments, positive
from titan_moe.config.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=positive, nargs="?", const=0, help="of the run")
    parser.add_argument("--nodes", type=positive, default=1, help="machines; default: 1")
    parser.add_argument("--node-rank", type=int, default=0, help="this machine's number")
    parser.add_argument("--endpoint", default="", help="HOST:PORT where machines meet")


def run(options: argparse.Namespace) -> Answer:
    """Train, and end the process."""
    from titan_moe.runtime.launch import end_with_parent
    from titan_moe.train import main

    arguments = job_arguments(options)
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
    elif options.ranks is not None:
        return Answer(exit_code=_start_ranks(options, arguments))
    if "RANK" in os.environ:
        end_with_parent()
    exit_code = main(arguments, os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    # Past every destructor and thread: those of NCCL and gloo wait for peers that hang, and after a
    # good run have been seen to abort. All that is written is on disk by now.
    os._exit(exit_code)


def _start_ranks(options: argparse.Namespace, arguments: list[str]) -> int:
    from titan_moe.runtime.launch import default_ranks
    from titan_moe.runtime.torchrun import Nodes, start_ranks
    from titan_moe.train import check_all

    if "RANK" in os.environ:
        raise ConfigError(["--ranks: torchrun has started this process already: leave it out"])
    nodes = Nodes(options.nodes, options.node_rank, options.endpoint)
    if nodes.number > 1 and not nodes.endpoint:
        raise ConfigError(
            [
                f"{nodes.number} nodes need --endpoint HOST:PORT (RDZV_ENDPOINT of run_train.sh), "
                "an address of the node with number 0"
            ]
        )
    ranks = options.ranks or nodes.number * default_ranks(os.environ)
    if sys.stdout.isatty():
        print(f"checking {options.config or 'the configuration'} and its data", flush=True)
    job = check_all(arguments, ranks, nodes.number, os.environ)
    return start_ranks(
        arguments,
        ranks=ranks // nodes.number,
        nodes=nodes,
        folder=Path(job.job.dump_folder),
        environment=os.environ,
    )


COMMAND = Command(run, add_arguments, overrides=True, help_of_keys=True, ends_at_once=True)
