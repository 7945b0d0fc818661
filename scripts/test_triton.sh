#!/usr/bin/env bash
# Compiles each Triton kernel for Hopper, without a GPU, with each Triton that an admitted torch brings.
#
#   ./scripts/test_triton.sh [VERSION...]
#
# A wheel is unpacked beside the environment, whose own Triton stays (1 GB at a time, in TMPDIR).
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
use_environment dev
cd "$repo"
# Those of torch 2.11 to 2.14, and the newest, which comes beside a torch for CPUs.
if (($# == 0)); then set -- 3.6.0 3.7.0 3.7.1 3.8.0 3.9.0; fi
wheel=$(mktemp -d)
trap 'rm -rf "$wheel"' EXIT
failed=0
for version; do
    echo "Triton $version"
    rm -rf "${wheel:?}"/*
    "$PYTHON" -m pip install --quiet --no-deps --target "$wheel" "triton==$version"
    PYTHONPATH="$wheel:$PYTHONPATH" TRITON_CACHE_DIR="$wheel/cache" \
        "$PYTHON" -m pytest -q tests/unit/ops/test_triton_compiles.py || failed=1
done
exit "$failed"
