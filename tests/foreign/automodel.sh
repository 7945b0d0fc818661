#!/usr/bin/env bash
# NeMo Automodel 0.7.0: its Qwen3-MoE. Of its requirements, those that a step on a CPU uses.

# shellcheck source=tests/foreign/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install transformers==5.24.0
install --no-deps nemo-automodel==0.7.0
step automodel_step.py "${1:-}"
judge
