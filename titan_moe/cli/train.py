"""Train a model: all keys, after this page.

    torchrun --nproc-per-node 8 -m titan_moe train --config FILE --training.steps 20
    titan-moe train --config FILE          one process

./run_train.sh starts torchrun with the GPUs of this machine or of several, checks the configuration
before it does, and says in one line why a run failed.

Exit codes: 0; 1 a run that failed; 2 a configuration that cannot run.
"""

import argparse
import os
import sys

from titan_moe.cli.command import Answer, Command, job_arguments


def run(options: argparse.Namespace) -> Answer:
    """Train, and end the process."""
    from titan_moe.runtime.launch import end_with_parent
    from titan_moe.train import main

    arguments = job_arguments(options)
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
    if "RANK" in os.environ:
        end_with_parent()
    exit_code = main(arguments, os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    # Past every destructor and thread: those of NCCL and gloo wait for peers that hang, and after a
    # good run have been seen to abort. All that is written is on disk by now.
    os._exit(exit_code)


COMMAND = Command(run, overrides=True, help_of_keys=True, ends_at_once=True)
