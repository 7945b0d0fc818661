# shellcheck shell=bash
# Sourced by the other scripts: finds or makes the Python environment, and finds the nodes of a run.

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# use_environment EXTRA sets $PYTHON to the active environment's Python if titan_moe's dependencies
# (and those of EXTRA, such as "dev", or "") are installed there, else to that of .venv, which is made
# if need be. use_environment EXTRA VENV REQUIREMENT takes or makes VENV instead, with that REQUIREMENT.
# .venv has torch 2.13, of which the goldens are.
use_environment() {
    local extra=$1 venv=${2:-$repo/.venv} lock
    export PYTHONPATH="$repo${PYTHONPATH:+:$PYTHONPATH}"
    PYTHON=$(python3 -c 'import sys; print(sys.executable)') || fail "python3 is not installed"
    if (($# == 1)) && has_dependencies "$PYTHON" "$extra"; then return; fi

    # One process at a time: two nodes may start on one shared folder.
    exec {lock}<"$repo"
    flock "$lock"
    if [[ -e $venv/unfinished ]] || ! has_dependencies "$venv/bin/python" "$extra"; then
        make_environment "$venv" "${3:-torch==2.13.*}"
    fi
    exec {lock}<&-
    PYTHON="$venv/bin/python"
}

# use_allocators chooses the allocators of ranks, unless the environment does. On a GPU segments grow,
# as titan-moe train has it too. On the CPU glibc keeps freed memory for the next step, and joins it: by
# default it hands large tensors back to the kernel, which clears every page again (half of the time of
# an elementwise pass), and keeps odd gaps between tensors in which no other tensor fits.
use_allocators() {
    if [[ -z ${PYTORCH_ALLOC_CONF:-}${PYTORCH_CUDA_ALLOC_CONF:-} ]]; then
        export PYTORCH_ALLOC_CONF=expandable_segments:True
    fi
    if [[ -n ${GLIBC_TUNABLES:-}$(compgen -e MALLOC_) ]] || compgen -G '/dev/nvidia[0-9]*' >/dev/null; then
        return
    fi
    local malloc=glibc.malloc
    # No mapping for any size, no end of the heap handed back; no lists of small chunks that are not
    # joined with their neighbours.
    GLIBC_TUNABLES=$malloc.mmap_max=0:$malloc.trim_threshold=4611686018427387904
    export GLIBC_TUNABLES+=:$malloc.tcache_count=0:$malloc.mxfast=0
}

# use_interface exports GLOO_SOCKET_IFNAME for a run on several machines, unless the environment does: the
# interface through which this machine reaches the host of RDZV_ENDPOINT. A run on one stays on loopback.
# By default gloo takes the address of the machine's own name; where that is loopback, no other node
# reaches it. The host may be a name of loopback on the machine that it names: then the interface of the
# default route is taken, by an address that stands for any other machine (RFC 5737).
use_interface() {
    local address host=${RDZV_ENDPOINT%:*}
    if ((NNODES < 2)) || [[ -n ${GLOO_SOCKET_IFNAME:-} ]]; then return; fi
    address=$(getent ahosts "$host" | awk '{ print $1; exit }') || return 0
    if [[ $address == 127.* && $host != 127.* && $host != localhost ]]; then address=192.0.2.1; fi
    address=$(ip -o route get "$address" | sed -n 's/.* src \([^ ]*\).*/\1/p') || return 0
    GLOO_SOCKET_IFNAME=$(ip -o address show to "$address" | awk '{ print $2; exit }') || return 0
    if [[ -n $GLOO_SOCKET_IFNAME ]]; then export GLOO_SOCKET_IFNAME; fi
} 2>/dev/null

# use_nodes exports NNODES, NODE_RANK and RDZV_ENDPOINT. Where they are not set, they come from the
# variables that Kubernetes' operators set for torchrun (PET_*), or from MASTER_ADDR and MASTER_PORT.
use_nodes() {
    local host=${PET_MASTER_ADDR:-${MASTER_ADDR:-}} port=${PET_MASTER_PORT:-${MASTER_PORT:-29500}}
    export NNODES=${NNODES:-${PET_NNODES:-1}} NODE_RANK=${NODE_RANK:-${PET_NODE_RANK:-0}}
    export RDZV_ENDPOINT=${RDZV_ENDPOINT:-${PET_RDZV_ENDPOINT:-${host:+$host:$port}}}
    if [[ ${PET_NPROC_PER_NODE:-} =~ ^[0-9]+$ ]]; then export NGPU=${NGPU:-$PET_NPROC_PER_NODE}; fi
    local name
    for name in NGPU NNODES NODE_RANK MAX_RESTARTS; do
        if [[ -n ${!name:-} && ! ${!name} =~ ^(0|[1-9][0-9]{0,5})$ ]]; then
            echo "error: $name=${!name} must be a whole number" >&2
            exit 2
        fi
    done
}

has_dependencies() {
    [[ -x $1 ]] && "$1" "$repo/scripts/has_dependencies.py" "$2" 2>/dev/null
}

make_environment() {
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "Python 3.10 or newer is needed; $PYTHON is $("$PYTHON" --version)"
    echo "titan_moe's dependencies are not in the active environment: installing them into $1 (minutes)"
    # The mark stays until the installation is complete; an interrupted one is started over.
    if [[ -e $1/unfinished ]]; then rm -rf "$1"; fi
    mkdir -p "$1"
    touch "$1/unfinished"
    "$PYTHON" -m venv "$1"
    "$1/bin/python" -m pip install --editable "${repo}[dev]" "$2"
    rm "$1/unfinished"
}

fail() {
    echo "error: $1" >&2
    exit 1
}
