"""Estimate what a configuration keeps on each GPU.

    python scripts/memory_estimate.py --ranks 64 --job.config_file FILE ...

Prints parameters and one line of GiB; titan_moe/simulate/memory.py says what they count. Runs
anywhere: no GPU is asked.
"""

import argparse
import sys

from titan_moe.config.errors import ConfigError
from titan_moe.config.parse import load_job
from titan_moe.models.hf import model_of_job
from titan_moe.models.stats import total
from titan_moe.runtime.failure import print_errors
from titan_moe.simulate.memory import memory


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--ranks", type=int, default=8)
    options, overrides = parser.parse_known_args(argv)
    try:
        job = load_job(overrides)
        config = model_of_job(job.model)
    except ConfigError as error:
        print_errors(error.lines)
        return 2
    size = total(config)
    print(f"{sum(size) / 1e9:.1f} G parameters, {size.active(config) / 1e9:.1f} G active")
    sections = (job.training, job.parallelism, job.activation_checkpoint)
    try:
        print("GiB:", memory(config, *sections, world_size=options.ranks))
    except ValueError as error:
        print_errors([str(error)])
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
