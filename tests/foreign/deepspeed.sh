#!/usr/bin/env bash
# DeepSpeed 0.19.8: ZeRO 0 to 2 and AutoEP, which transformers 5.24 stops (its registry has another get).

# shellcheck source=tests/foreign/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install setuptools wheel transformers==5.14.1
install --no-build-isolation deepspeed==0.19.8
# DeepSpeed compiles here; in the home's cache the lock of a run that was stopped would be waited for.
export TORCH_EXTENSIONS_DIR=$folder/extensions
step deepspeed_step.py "${1:-}"
judge
