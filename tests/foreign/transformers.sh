#!/usr/bin/env bash
# transformers 5.24.0: its own expert, tensor and FSDP2 parallelism, in a plain loop and in its Trainer.

# shellcheck source=tests/foreign/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install transformers==5.24.0 accelerate==1.15.0
step transformers_step.py "${1:-}"
judge
