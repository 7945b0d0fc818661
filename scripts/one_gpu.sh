#!/usr/bin/env bash
# One call on one GPU, offline, with torch 2.11: the most evidence in ten minutes, one stage after
# another, each with a limit of time.
#
#   ./scripts/one_gpu.sh wheels                  first, where there is a network: fetches what such a
#                                                machine lacks into scripts/one_gpu/wheels (3 MB)
#   ./scripts/one_gpu.sh OUT --commit ID         there; without --commit it asks git
#   ./scripts/one_gpu.sh OUT --only slice,gate   another call: these stages, in this order
#   ./scripts/one_gpu.sh OUT --device cpu        the same with toy sizes: 6 minutes
#
# OUT gets one_gpu.json, written anew before and after each stage, log.txt with all output, and
# files.tar.gz. Whenever the call is cut short, they hold what was seen until then. Installs nothing:
# the wheels, for Python 3.12, are unpacked into a folder that is deleted at the end.
#
# Exit codes: 0 every stage passed, or cannot be seen here; 1 a stage failed; 2 a wrong argument;
# 130 interrupted.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
wheels=$repo/scripts/one_gpu/wheels
python=${PYTHON:-python3}

if [[ ${1:-} == wheels ]]; then
    rm -rf "$wheels"
    exec "$python" -m pip download --quiet --dest "$wheels" --only-binary=:all: --python-version 3.12 \
        --implementation cp --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
        pydantic tomli-w
fi

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export PYTHONPATH="$repo${PYTHONPATH:+:$PYTHONPATH}"
has_packages() { "$python" -c "import pydantic, tomli_w" 2>/dev/null; }
if ! has_packages; then
    for wheel in "$wheels"/*.whl; do
        if [[ -e $wheel ]]; then "$python" -m zipfile -e "$wheel" "$site"; fi
    done
    export PYTHONPATH="$PYTHONPATH:$site"
    if ! has_packages; then
        echo "error: $("$python" --version) has no pydantic and no tomli-w, and scripts/one_gpu/wheels" \
            "has none for it: run scripts/one_gpu.sh wheels first, where there is a network" >&2
        exit 1
    fi
fi
cd "$repo"
"$python" -m scripts.one_gpu "$@"
