#!/usr/bin/env bash
# torch 2.13.0: FlopCounterMode counts torch.nn.functional.grouped_mm as nothing, forward and backward,
# and does not say that it left an operation out. A model's utilisation that is taken from it lacks the
# routed experts, most of the work of many mixture-of-experts models.
#
# Seen on 2026-11-30 (torch 2.13.0, Python 3.11), 2 experts with 4 tokens each, dims 16 and 32:
#   forward and backward of the same experts: bmm 24576 FLOPs, grouped_mm 0 FLOPs
#
# Exits with 1 if that changes. Needs a package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMP_NUM_THREADS=1 TMPDIR="$folder"
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cd "$folder"
cat > run.py <<'PYTHON'
import sys

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

TOKENS, DIM, WIDTH, EXPERTS = 8, 16, 32, 2
x = torch.randn(TOKENS, DIM, dtype=torch.bfloat16, requires_grad=True)
weights = torch.randn(EXPERTS, DIM, WIDTH, dtype=torch.bfloat16, requires_grad=True)
offsets = torch.tensor([4, 8], dtype=torch.int32)  # As many tokens for each expert.


def flops(product):
    with FlopCounterMode(display=False) as counter:
        y = product()
        (y * y).sum().backward()
    return counter.get_total_flops()


batched = flops(lambda: torch.bmm(x.view(EXPERTS, -1, DIM), weights))
grouped = flops(lambda: F.grouped_mm(x, weights, offs=offsets))
print(f"forward and backward of the same experts: bmm {batched} FLOPs, grouped_mm {grouped} FLOPs")
if (batched, grouped) != (3 * 2 * TOKENS * DIM * WIDTH, 0):
    sys.exit("torch has changed: grouped_mm is counted")
PYTHON
venv/bin/python run.py 2> errors || { cat errors; exit 1; }
