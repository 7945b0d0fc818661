#!/usr/bin/env bash
# The first hour on a machine with GPUs: does it start, is it right, what does it say when it breaks,
# how fast is it? Writes one page and one JSON file, made to be attached to an issue.
#
#   ./scripts/first_hour.sh                          all parts, on the GPUs of this machine
#   ./scripts/first_hour.sh --only bench             some parts
#   ./scripts/first_hour.sh --device cpu             debug models on 4 CPU processes: 15 minutes
#   srun --nodes 8 --ntasks 8 bash -c \
#       'NNODES=8 NODE_RANK=$SLURM_PROCID RDZV_ENDPOINT=HOST:29500 ./scripts/first_hour.sh'
#
# The same command goes on where it was interrupted: parts that have passed with this commit on as many
# ranks are not run again; an earlier folder of a part that runs again is renamed to PART.1. A part that
# fails or takes too long does not stop the others.
#
# Exit codes: 0 every part passed, or cannot be seen here; 1 a part failed; 2 a wrong argument;
# 130 interrupted.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
use_environment dev
use_nodes
use_interface
use_allocators
cd "$repo"
exec "$PYTHON" -m scripts.first_hour "$@"
