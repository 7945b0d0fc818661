#!/usr/bin/env bash
# Train on many nodes: one run_train.sh per node, which meet on the first.
#
#   CONFIG_FILE=configs/qwen3/30B-A3B_64gpu.toml sbatch --nodes 8 scripts/slurm_train.sh [overrides]
#
# Five minutes before the job's time ends, Slurm asks the run to stop, and the job is queued again:
# with checkpoints it goes on where it stopped.
#
#SBATCH --job-name=titan_moe
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# All of a node's memory: asynchronous saves keep a copy of the state in it.
#SBATCH --mem=0
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# sbatch runs a copy of this file: the repository is where the job was submitted from.
cd "$SLURM_SUBMIT_DIR"
NNODES=${NNODES:-$SLURM_JOB_NUM_NODES}
read -r head_node < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
RDZV_ENDPOINT=$head_node:${PORT:-29500}
# Made by a run that stopped, saved. srun's own exit code may be another: the first node to end with
# one lets it end the others.
TITAN_MOE_STOPPED=$PWD/slurm-$SLURM_JOB_ID.stopped
export NNODES RDZV_ENDPOINT TITAN_MOE_STOPPED
rm -f "$TITAN_MOE_STOPPED"

# srun does not take over sbatch's CPUs (Slurm 22.05 and later): a node's task, and with it all of its
# ranks, would get a single core. torchrun's ranks share the cores; --cpu-bind=none leaves all of
# them to each.
#
# In the background, so that this script passes a signal on, as of a comparison that is interrupted:
# srun forwards SIGTERM to all tasks, and only counts them at a first SIGINT.
# The trap is there before the tasks are.
trap 'kill -TERM "$!"' INT TERM
# shellcheck disable=SC2016  # SLURM_PROCID is each task's own.
srun --nodes="$NNODES" --ntasks="$NNODES" --kill-on-bad-exit=1 \
    --gpus-per-node="${SLURM_GPUS_PER_NODE:-8}" \
    --cpus-per-task="${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}" --cpu-bind=none \
    bash -c 'NODE_RANK=$SLURM_PROCID exec ./run_train.sh "$@"' titan_moe "$@" &
code=0
wait "$!" || code=$?
while kill -0 "$!" 2>/dev/null; do
    code=0
    wait "$!" || code=$?
done
if [[ -e $TITAN_MOE_STOPPED ]]; then
    rm "$TITAN_MOE_STOPPED"
    code=75
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
