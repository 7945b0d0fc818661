#!/usr/bin/env bash
# Train a model. The first use sets up an environment.
#
#   ./run_train.sh                                     a small model, on the GPUs found or on the CPU
#   CONFIG_FILE=configs/debug/default.toml ./run_train.sh --training.steps 20    a config, with overrides
#   NGPU=8 NNODES=8 CONFIG_FILE=configs/qwen3/30B-A3B_64gpu.toml ./run_train.sh --dry-run    check and
#                                                      count a step of 64 ranks, on any machine
#   ./run_train.sh --help                              every key
#
# NGPU           ranks on this machine        (the GPUs found, else 2 CPU processes)
# CONFIG_FILE    the configuration            (configs/debug/default.toml)
# LOG_RANK       ranks that print, as in 0,1  (0)
# NNODES         machines                     (1)
# NODE_RANK      this machine's number; number 0 hosts the meeting point  (0)
# RDZV_ENDPOINT  host:port of machine 0, where all machines meet  (MASTER_ADDR:MASTER_PORT)
#                PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, ..., as Kubernetes' operators set them,
#                stand in for those that are not set
# MAX_RESTARTS   how often all ranks start again, from the latest checkpoint, after one failed  (0)
#
# With checkpoints, SIGTERM and SIGUSR1 ask the run to stop after the present step, saved. A second
# SIGTERM ends it at once.
#
# Exit codes: 0 for the last step, 75 for a run that stopped before it, saved: start it again; 2 for
# a configuration that cannot run, 1 for a run that failed, 70 for an error in titan_moe, 130 and 143
# for one that was interrupted.
# Python reads all between the next line and the last as a string, and the end of the last as code.
''':' # Does nothing.
set -euo pipefail
trap 'exit 130' INT
trap 'exit 143' TERM
trap '' USR1 # Until Python can answer it.

# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/scripts/environment.sh"
use_environment ""

# What Python imports is this checkout's, wherever the script is called from and whatever the
# environment has installed.
export PYTHONSAFEPATH=1 TITAN_MOE_CHECKOUT="$repo"

case " $* " in
    *" --help "* | *" -h "*) exec "$PYTHON" -m titan_moe train --help ;;
esac

use_nodes
use_interface
use_allocators

trap '' INT # Until Python ends by it.
exec "$PYTHON" -m titan_moe train --max-restarts "${MAX_RESTARTS:-0}" \
    --config "${CONFIG_FILE:-$repo/configs/debug/default.toml}" \
    ${NGPU:+--ranks "$((NGPU * NNODES))"} --nodes "$NNODES" --node-rank "$NODE_RANK" \
    --endpoint "$RDZV_ENDPOINT" "$@"
# '''; raise SystemExit("run_train.sh is for bash: type ./run_train.sh, torchrun --no-python ./run_train.sh, or torchrun -m titan_moe.train")
