"""Check a run's configuration and data in one plain process, before any rank starts.

    python scripts/check_config.py --nodes 2 --ranks-per-node 8 --job.config_file FILE ...

Prints the number of ranks of a node and the run's folder, which run_train.sh reads. Exit code 2 and
one line per problem when something is wrong.
"""

import argparse
import os
import sys

from titan_moe.config.checks.data import check_vocabulary
from titan_moe.config.errors import ConfigError
from titan_moe.data.build import check_data
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.runtime.failure import print_errors
from titan_moe.runtime.launch import count_gpus, end_on_signals
from titan_moe.train import prepare

_CPU_RANKS = 2


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--ranks-per-node", type=int, help="default: the GPUs found, else 2")
    options, overrides = parser.parse_known_args(argv)
    ranks = options.ranks_per_node or count_gpus(os.environ) or _CPU_RANKS
    try:
        job, model = prepare(overrides, ranks * options.nodes, os.environ)
        if problems := check_data(job.training, job.validation, job.model.tokenizer_path):
            raise ConfigError(problems)
        tokenizer = load_tokenizer(job.model.tokenizer_path)
        if problems := check_vocabulary(job, model, tokenizer.vocab_size):
            raise ConfigError(problems)
    except ConfigError as error:
        print_errors(error.lines)
        return 2
    print(ranks, job.job.dump_folder, sep="\n")
    return 0


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main(sys.argv[1:]))
