#!/usr/bin/env bash
# torchtitan 0.3.0: Qwen3-MoE in its Trainer, with its three backends.

# shellcheck source=tests/foreign/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torchtitan==0.3.0 triton==3.7.1
step torchtitan3_step.py "${1:-}"
judge
