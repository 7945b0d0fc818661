#!/usr/bin/env bash
# megatron-core 0.19.2 asks for Python 3.12; what runs here is right for 3.11 too. Tensor parallelism stops.

# shellcheck source=tests/foreign/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install triton==3.7.1 packaging einops
install --no-deps --ignore-requires-python megatron-core==0.19.2
step megatron_step.py "${1:-}"
judge
