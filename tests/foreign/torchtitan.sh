#!/usr/bin/env bash
# torchtitan 0.2.2: Qwen3-MoE and DeepSeek-V3 in its Trainer.

# shellcheck source=tests/foreign/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torchtitan==0.2.2
step torchtitan_step.py "${1:-}"
judge
