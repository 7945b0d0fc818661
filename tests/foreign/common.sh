# shellcheck shell=bash
# Sourced by the scripts beside it, one for each other training stack. Each makes the stack's environment
# and tiny models in a temporary folder, runs one step in several layouts on gloo, and prints what
# titan-moe verify foreign says of each; docs/court.md has the table. An argument chooses runs by a
# regular expression. Needs a package index; 2 to 10 minutes on 2 cores.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/environment.sh
source "$here/../../scripts/environment.sh"
use_environment dev
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# install REQUIREMENT... and options of pip, into an environment that begins with torch's CPU build.
install() {
    if [[ ! -e $folder/venv ]]; then
        "$PYTHON" -m venv "$folder/venv"
        "$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 safetensors==0.8.0
    fi
    "$folder/venv/bin/pip" install --quiet "$@"
}

# step SCRIPT [REGEX] runs the stack.
step() {
    "$PYTHON" "$here/tiny.py" "$folder/models" 2>"$folder/log"
    env -u PYTHONPATH "$folder/venv/bin/python" "$here/$1" "$folder/steps" "$folder/models" "${2:-}"
}

judge() {
    "$PYTHON" "$here/judge.py" "$folder/steps" "$folder/models"
}
