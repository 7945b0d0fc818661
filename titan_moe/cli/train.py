"""Train a model: all keys, after this page; --help training has the keys of that table alone.

    titan-moe train --config qwen3/debugmodel_moe --training.steps 20
    titan-moe train --config FILE --ranks 4
    titan-moe train --config FILE --one-process        without torchrun, for a debugger
    titan-moe train --config FILE --ranks 64 --dry-run 0 63        nothing is trained or written
    torchrun --nproc-per-node 4 -m titan_moe train --config FILE        each rank by hand

It starts a rank on each GPU that it finds, else 2 processes, unless --ranks says how many.
--config takes a file, or the name of a configuration that comes with titan_moe. The configuration
and its data are checked, then torchrun starts the ranks of this machine, and one line says why a
run failed. On several machines --ranks counts the ranks of all, and each machine gets --nodes N
--node-rank I --endpoint HOST:PORT, an address of machine 0. ./run_train.sh of a checkout is this
command in the environment that it makes.

SIGTERM and SIGUSR1 ask a run with checkpoints to stop after the present step, saved; a second
SIGTERM ends it at once. --max-restarts N starts all ranks again, from the latest checkpoint, up to
N times after one has failed. --dry-run makes all checks, counts what some ranks, else rank 0, send
and hold in the first step, simulated on one CPU core, and names what the run would write.

Exit codes: 0; 1 a run that failed; 2 a configuration that cannot run; 70 an error in titan_moe; 75
stopped before the last step and saved, by a signal: start it again; 130 or
143 interrupted.
"""

import argparse
import os
import re
import signal
import sys
from pathlib import Path

from titan_moe.cli.command import Answer, Command, add_ranks, job_arguments, not_negative, positive
from titan_moe.config.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_ranks(parser, says="ranks of all machines; default: their GPUs, else 2")
    parser.add_argument("--one-process", action="store_true", help="without torchrun")
    parser.add_argument("--nodes", type=positive, default=1, help="machines; default: 1")
    parser.add_argument("--node-rank", type=int, default=0, help="this machine's number")
    parser.add_argument("--endpoint", default="", help="HOST:PORT where machines meet")
    parser.add_argument(
        "--max-restarts", type=not_negative, default=0, help="after failures; default: 0"
    )
    says = "check, simulate a step of these ranks, start none"
    parser.add_argument("--dry-run", type=not_negative, nargs="*", metavar="RANK", help=says)


def run(options: argparse.Namespace) -> Answer:
    from titan_moe.config.parse import table_of_help
    from titan_moe.runtime.launch import end_with_parent, is_rank
    from titan_moe.runtime.stopping import attempt_folder

    is_launcher = not (is_rank(os.environ) or options.one_process) or options.dry_run is not None
    if is_launcher:  # It says that it was interrupted, also while it imports and checks.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if is_rank(os.environ):
        end_with_parent()
        # Early: where a rank dies as it starts again, an earlier attempt's words no longer count.
        attempt_folder(os.environ)
    from titan_moe.train import main

    arguments = job_arguments(options)
    if {"-h", "--help"} & set(arguments):
        if table_of_help(arguments) is None:
            print(__doc__)
    elif is_launcher:
        return Answer(exit_code=_start_ranks(options, arguments))
    exit_code = main(arguments, os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    # Past every destructor and thread: those of NCCL and gloo wait for peers that hang, and after a
    # good run have been seen to abort. All that is written is on disk by now.
    os._exit(exit_code)


def _dry_run(options: argparse.Namespace, arguments: list[str], ranks: int) -> None:
    """Prints what the first step of some ranks sends and holds, and what a run would write."""
    from titan_moe.config.training_stages import training_stages
    from titan_moe.prepare.job import check_all
    from titan_moe.simulate.step import rank_step, simulate_steps

    job, notes = check_all(arguments, ranks, options.nodes, os.environ)
    (_, first), *_ = training_stages(job)
    chosen = options.dry_run or [0]
    tasks = [rank_step(first, ranks, rank=rank) for rank in chosen]
    print(*notes, sep="\n", end="\n" * bool(notes), flush=True)
    for rank, facts in zip(chosen, simulate_steps(tasks), strict=True):
        print(f"rank {rank} of {facts.in_words()}", flush=True)
    folder, saves = Path(job.job.dump_folder), job.checkpoint
    print(f"would write to {folder}: config.toml, run.json, metrics.jsonl, events.jsonl")
    if saves.keeps_state:
        print(f"and checkpoints each {saves.interval} steps to {folder / saves.folder}")


def _start_ranks(options: argparse.Namespace, arguments: list[str]) -> int:
    from titan_moe.runtime.torchrun import Nodes, start_ranks

    # Until the launcher answers it: checks may take long. Before there is a thread, which inherits
    # the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    from titan_moe.prepare.job import check_all
    from titan_moe.runtime.launch import default_ranks

    ranks = options.ranks or options.nodes * default_ranks(os.environ)
    if options.dry_run is not None:
        _dry_run(options, arguments, ranks)
        return 0
    nodes = Nodes(options.nodes, options.node_rank, options.endpoint, options.max_restarts)
    if nodes.number > 1 and not re.fullmatch(r".+:\d{1,5}", options.endpoint):
        raise ConfigError(
            f"{options.nodes} nodes need --endpoint HOST:PORT (RDZV_ENDPOINT of run_train.sh), "
            f"an address of the node with number 0, not {options.endpoint!r}"
        )
    if not 0 <= nodes.this < nodes.number:
        raise ConfigError(
            f"--node-rank {nodes.this} (NODE_RANK of run_train.sh) must be one of 0 to "
            f"{nodes.number - 1}, for --nodes {nodes.number}"
        )
    if sys.stdout.isatty():
        print(f"checking {options.config or 'the configuration'} and its data", flush=True)
    job, _ = check_all(arguments, ranks, nodes.number, os.environ)
    saves = job.checkpoint.keeps_state
    if nodes.max_restarts and not saves:
        raise ConfigError(
            f"--max-restarts {nodes.max_restarts} (MAX_RESTARTS of run_train.sh) goes on from "
            "checkpoints: set checkpoint.enable=true and checkpoint.load_only=false"
        )
    return start_ranks(
        ["train", *arguments],
        ranks=ranks // nodes.number,
        nodes=nodes,
        folder=Path(job.job.dump_folder),
        stop_timeout_s=job.training.stop_timeout_seconds if saves else None,
        environment=os.environ,
    )


COMMAND = Command(run, add_arguments, overrides=True, help_of_keys=True, ends_at_once=True)
