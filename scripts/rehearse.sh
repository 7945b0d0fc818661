#!/usr/bin/env bash
# Rehearse CUDA without a GPU: one rank of many layouts, on fake tensors of cuda:0.
#
#   ./scripts/rehearse.sh                 all cases; exit code 1 and a line for each finding
#   ./scripts/rehearse.sh --help          what else there is
#
# The first use installs torch's CUDA build (about 5 GB) into an environment of its own,
# REHEARSAL_ENV, by default ~/.cache/titan_moe/rehearsal; gcc is needed.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${REHEARSAL_ENV:-$HOME/.cache/titan_moe/rehearsal}
sources=$repo/scripts/rehearsal
export PYTHONPATH="$repo${PYTHONPATH:+:$PYTHONPATH}"

if [[ ! -e $venv/finished ]]; then
    echo "installing torch for CUDA into $venv (about 5 GB)"
    python3 -m venv "$venv"
    # Three equals signs: "2.13.0" alone also names the CPU build.
    "$venv/bin/pip" install --quiet 'torch===2.13.0'
    # What titan_moe depends on, and not itself: the working tree is rehearsed. From a copy, for pip
    # leaves a folder "build" where it builds.
    copy=$(mktemp -d)
    cp -r "$repo"/{pyproject.toml,README.md,LICENSE,titan_moe} "$copy"
    "$venv/bin/pip" install --quiet "$copy"
    "$venv/bin/pip" uninstall --quiet --yes titan_moe
    rm -rf "$copy"
    touch "$venv/finished"
fi

headers=$("$venv/bin/python" - <<'PYTHON'
import pathlib
import triton

print(pathlib.Path(triton.__file__).parent / "backends/nvidia/include")
PYTHON
)
shims=$venv/shims
mkdir -p "$shims"
compile() {
    if [[ ! $shims/$2 -nt $sources/$1 ]]; then
        gcc -shared -fPIC -O1 -Wall -I "$headers" "$sources/$1" -o "$shims/$2" -ldl
    fi
}
compile cudart.c libcudart_rehearsal.so
compile driver.c libcuda.so.1

cd "$repo"
LD_LIBRARY_PATH="$shims${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" \
    LD_PRELOAD="$shims/libcudart_rehearsal.so" \
    exec "$venv/bin/python" -m scripts.rehearsal "$@"
