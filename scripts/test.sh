#!/usr/bin/env bash
# Lint, types, tests. The first use sets up an environment.
#
#   ./scripts/test.sh                the default tier: at most 10 minutes on 2 cores
#   ./scripts/test.sh --slow         the default and the slow tier
#   ./scripts/test.sh --full         everything: about 6 hours
#   ./scripts/test.sh --slice 7      the default tier and, as CI does, slice 7 of the others: 3 slices
#                                    that follow one another have all slow tests, 40 all tests
#   ./scripts/test.sh -k router      further arguments go to pytest
#
# Tests share 2 processes, a file in one of them; TEST_PROCESSES is another number. Files run in the
# order of their names: by their number of tests, the longest ones, which have few, would run last.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
use_environment dev
cd "$repo"
# Hundreds of processes import the same files: compiled once, though images often say never.
unset PYTHONDONTWRITEBYTECODE

tier=default
options=()
while (($#)); do
    case $1 in
        --slow | --full) tier=${1#--} ;;
        *) options+=("$1") ;;
    esac
    shift
done

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
"$PYTHON" -m pytest --tier "$tier" -n "${TEST_PROCESSES:-2}" --dist loadfile \
    --no-loadscope-reorder "${options[@]}"
