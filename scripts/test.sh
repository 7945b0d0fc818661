#!/usr/bin/env bash
# Lint, types, tests. The first use sets up an environment.
#
#   ./scripts/test.sh             everything but the long tier
#   ./scripts/test.sh --full      everything
#   ./scripts/test.sh -k router   further arguments go to pytest
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
use_environment dev
cd "$repo"

tier=(-m "not full")
if [[ ${1:-} == --full ]]; then
    tier=()
    shift
fi

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
"$PYTHON" -m pytest "${tier[@]}" "$@"
