#!/usr/bin/env bash
# The default tier, without lint and types, with a version of torch that pyproject.toml admits.
#
#   ./scripts/test_torch.sh 2.11.0 [OPTION OF PYTEST...]
#
# The first use installs that torch and all else into .venv-torch-VERSION: minutes, and gigabytes.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
version=${1:?which version of torch? such as 2.11.0}
use_environment dev "$repo/.venv-torch-$version" "torch==$version"
cd "$repo"
"$PYTHON" -c 'import sys, torch; print("torch", torch.__version__, "Python", sys.version.split()[0])'
PATH="$(dirname "$PYTHON"):$PATH" exec "$PYTHON" -m pytest --tier default \
    -n "${TEST_PROCESSES:-2}" --dist loadfile "${@:2}"
