#!/usr/bin/env bash
# torch 2.13.0: autocast on a CPU does not know torch.nn.functional.grouped_mm. In a model under
# autocast(bfloat16) experts that get float32 rows are multiplied in float32, and those behind a linear
# layer, whose result is bfloat16 already, fail beside their float32 weights; bmm is cast in both.
#
# Seen on 2026-11-30 (torch 2.13.0, Python 3.11):
#   bmm of float32: torch.bfloat16
#   grouped_mm of float32: torch.float32
#   bmm behind a linear layer: torch.bfloat16
#   grouped_mm behind a linear layer: expected m1 and m2 to have the same dtype, but got: c10::BFloat16 != float
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
from torch import nn

dense, experts = nn.Linear(16, 16, bias=False), torch.randn(2, 16, 16)
x, offsets = torch.randn(8, 16), torch.tensor([4, 8], dtype=torch.int32)
seen = {}
with torch.autocast("cpu", dtype=torch.bfloat16):
    h = dense(x)
    cases = {
        "bmm of float32": lambda: torch.bmm(x.view(2, 4, 16), experts),
        "grouped_mm of float32": lambda: F.grouped_mm(x, experts, offs=offsets),
        "bmm behind a linear layer": lambda: torch.bmm(h.view(2, 4, 16), experts),
        "grouped_mm behind a linear layer": lambda: F.grouped_mm(h, experts, offs=offsets),
    }
    for name, product in cases.items():
        try:
            seen[name] = str(product().dtype)
        except RuntimeError as error:
            seen[name] = str(error)
        print(f"{name}: {seen[name]}")
bfloat16, float32, again, refused = seen.values()
if not (bfloat16 == again == "torch.bfloat16" and float32 == "torch.float32" and "same dtype" in refused):
    sys.exit("torch has changed: autocast treats grouped_mm otherwise")
PYTHON
venv/bin/python run.py 2> errors || { cat errors; exit 1; }
