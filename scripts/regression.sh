#!/usr/bin/env bash
# Run a regression suite, or one comparison, on the GPUs of one machine or of several.
#
#   ./scripts/regression.sh suite configs/suites/8gpu.toml
#   ./scripts/regression.sh losses --config FILE --baseline revision=main
#   sbatch --nodes 8 scripts/regression.sh suite configs/suites/64gpu.toml
#   NNODES=8 NODE_RANK=0 RDZV_ENDPOINT=HOST:29500 ./scripts/regression.sh ...    on each machine
#
# Arguments are those of titan-moe verify. NNODES, NODE_RANK, RDZV_ENDPOINT and NGPU are those of
# run_train.sh. The first machine compares; every training starts on as many machines as it needs: by
# srun under Slurm, else by scripts/every_node.py. All machines must see the checkout and --out.
#
# The exit code is that of titan-moe verify on every machine, 0 for a suite that is as expected. 130:
# interrupted, the same command goes on. Slurm interrupts two minutes before the job's time ends.
#
#SBATCH --job-name=regression
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
# B: because this process is the only one that is asked. It ends its training itself.
#SBATCH --signal=B:INT@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# sbatch runs a copy of this file: the repository is where the job was submitted from.
here=$(dirname "${BASH_SOURCE[0]}")
if [[ ! -f $here/environment.sh ]]; then here=$SLURM_SUBMIT_DIR/scripts; fi
# shellcheck source=scripts/environment.sh
source "$here/environment.sh"
use_environment ""
cd "$repo"

verify=("$PYTHON" -m titan_moe verify "$@")
if [[ -n ${SLURM_JOB_NUM_NODES:-} ]]; then
    if [[ ${SLURM_PROCID:-0} != 0 ]]; then
        echo "error: start $0 by sbatch, or once in an allocation, not by srun" >&2
        exit 2
    fi
    exec "${verify[@]}"
fi
use_nodes
if ((NNODES == 1)); then exec "${verify[@]}"; fi
if ((NODE_RANK >= NNODES)) || [[ ! $RDZV_ENDPOINT =~ ^.+:[0-9]{1,5}$ ]]; then
    echo "error: NNODES=$NNODES needs NODE_RANK from 0 to $((NNODES - 1)), not $NODE_RANK, and" \
        "RDZV_ENDPOINT=HOST:PORT of node 0, not '$RDZV_ENDPOINT'" >&2
    exit 2
fi
exec "$PYTHON" scripts/every_node.py "${verify[@]}"
