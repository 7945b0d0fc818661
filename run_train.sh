#!/usr/bin/env bash
# Train a model. The first use sets up an environment.
#
#   ./run_train.sh                                     a small model, on the GPUs found or on the CPU
#   CONFIG_FILE=configs/debug/default.toml ./run_train.sh --training.steps 20    a config, with overrides
#   ./run_train.sh --help                              every key
#
# NGPU           ranks on this machine        (the GPUs found, else 2 CPU processes)
# CONFIG_FILE    the configuration            (configs/debug/default.toml)
# LOG_RANK       ranks that print, as in 0,1  (0)
# NNODES         machines                     (1)
# NODE_RANK      this machine's number; number 0 hosts the meeting point  (0)
# RDZV_ENDPOINT  host:port of machine 0, where all machines meet
#
# Exit codes: 2 for a configuration that cannot run, 1 for a run that failed.
set -euo pipefail
trap 'exit 130' INT
trap 'exit 143' TERM

# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/scripts/environment.sh"
use_environment ""

# What Python imports is this checkout's, wherever the script is called from and whatever the
# environment has installed.
export PYTHONSAFEPATH=1 TITAN_MOE_CHECKOUT="$repo"

case " $* " in
    *" --help "* | *" -h "*) exec "$PYTHON" -m titan_moe train --help ;;
esac

for name in NGPU NNODES NODE_RANK; do
    if [[ -n ${!name:-} && ! ${!name} =~ ^[0-9]+$ ]]; then
        echo "error: $name=${!name} must be a whole number" >&2
        exit 2
    fi
done
nodes=${NNODES:-1}
node=${NODE_RANK:-0}
endpoint=${RDZV_ENDPOINT:-}
if ((nodes > 1)) && [[ -z $endpoint ]]; then
    fail "NNODES=$nodes needs RDZV_ENDPOINT=host:port, an address of the machine with NODE_RANK=0"
fi
job=(--job.config_file "${CONFIG_FILE:-$repo/configs/debug/default.toml}" "$@")

# A Ctrl-C is this script's to answer, not Python's import machinery's.
plan=$(trap '' INT; "$PYTHON" -m titan_moe check --nodes "$nodes" \
    ${NGPU:+--ranks "$((NGPU * nodes))"} "${job[@]}")
{ read -r ranks && read -r folder; } <<<"$plan"

# torchrun's own words and every rank's warnings: out of sight, and kept.
log="$folder/launch/$(date +%Y%m%d-%H%M%S)-node$node-$$.log"
if ! refusal=$(mkdir -p "$folder/launch" 2>&1 && : 2>&1 >"$log"); then
    fail "cannot write to job.dump_folder=$folder: ${refusal##*: }"
fi
TITAN_MOE_FAILURES=$(mktemp -d)
export TITAN_MOE_FAILURES
trap 'rm -rf "$TITAN_MOE_FAILURES"' EXIT

# torchrun would set one thread per rank.
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}

torchrun=("$(dirname "$PYTHON")/torchrun" --nproc-per-node "$ranks")
if ((nodes == 1)); then
    torchrun+=(--standalone)
else
    torchrun+=(--nnodes "$nodes" --rdzv-backend c10d --rdzv-endpoint "$endpoint"
        --rdzv-id "${SLURM_JOB_ID:-titan_moe}" --rdzv-conf "is_host=$((node == 0))")
fi
command=("${torchrun[@]}" -m titan_moe train "${job[@]}")
printf '%q ' "${command[@]}"
echo

# In a session of its own, torchrun gets one signal, and the one that ends its ranks in good order.
interrupted=0
setsid "${command[@]}" 2>"$log" &
child=$!
trap 'interrupted=130; kill -TERM $child 2>/dev/null || true' INT
trap 'interrupted=143; kill -TERM $child 2>/dev/null || true' TERM HUP
code=0
wait "$child" || code=$?
while kill -0 "$child" 2>/dev/null; do
    wait "$child" || code=$?
done

if ((interrupted)); then
    # A progress bar may be on the line.
    printf '\ninterrupted; with checkpoint.enable, the same command goes on from the latest step saved\n'
    echo "the files of this run are in $folder"
    exit "$interrupted"
fi
if ((code)); then
    "$PYTHON" -m titan_moe report failure "$TITAN_MOE_FAILURES" "$log" --endpoint "$endpoint"
fi
