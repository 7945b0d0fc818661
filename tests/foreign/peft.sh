#!/usr/bin/env bash
# peft 0.21.2: adapters of stacked experts under FSDP2, beside one process of peft.

# shellcheck source=tests/foreign/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install peft==0.21.2 transformers==5.24.0 accelerate==1.15.0
step peft_step.py "${1:-}"
