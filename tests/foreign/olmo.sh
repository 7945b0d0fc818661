#!/usr/bin/env bash
# OLMo-core 3.0.0: imports on a CPU, and its MoE layer stops at Triton kernels.

# shellcheck source=tests/foreign/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install ai2-olmo-core==3.0.0
step olmo_step.py
