#!/usr/bin/env bash
# Train on many nodes: one run_train.sh per node, which meet on the first.
#
#   CONFIG_FILE=configs/qwen3/30B-A3B_64gpu.toml sbatch --nodes 8 scripts/slurm_train.sh [overrides]
#
#SBATCH --job-name=titan_moe
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
set -euo pipefail

# sbatch runs a copy of this file: the repository is where the job was submitted from.
cd "$SLURM_SUBMIT_DIR"
NNODES=${NNODES:-$SLURM_JOB_NUM_NODES}
read -r head_node < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
RDZV_ENDPOINT=$head_node:${PORT:-29500}
export NNODES RDZV_ENDPOINT

# shellcheck disable=SC2016  # SLURM_PROCID is each task's own.
exec srun --nodes="$NNODES" --ntasks="$NNODES" --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_PROCID exec ./run_train.sh "$@"' titan_moe "$@"
