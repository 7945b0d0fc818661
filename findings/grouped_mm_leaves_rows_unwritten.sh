#!/usr/bin/env bash
# torch 2.13.0: torch.nn.functional.grouped_mm does not write the rows behind the last offset, neither
# in its output nor in the gradient of its input: they hold what the memory held before. A buffer of
# rows that is larger than the number of tokens gets arbitrary numbers there, and a NaN among them
# survives the product with a routing weight of 0. Here memory that is not written is filled with NaN.
#
# Seen on 2026-11-30 (torch 2.13.0, Python 3.11), 6 rows, of which the first 4 belong to experts:
#   output:               [16.0, 16.0, 16.0, 16.0, nan, nan]
#   output times 0 or 1:  [16.0, 16.0, 16.0, 16.0, nan, nan]
#   gradient of the rows: [16.0, 16.0, 16.0, 16.0, nan, nan]
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

# Fills memory that torch allocates and does not write with NaN, so that it can be told apart.
torch.use_deterministic_algorithms(True)
x = torch.ones(6, 16, dtype=torch.bfloat16, requires_grad=True)
weights = torch.ones(2, 16, 16, dtype=torch.bfloat16, requires_grad=True)
offsets = torch.tensor([1, 4], dtype=torch.int32)  # Rows 4 and 5 belong to no expert.
y = F.grouped_mm(x, weights, offs=offsets)
weight_of_row = torch.tensor([1, 1, 1, 1, 0, 0]).unsqueeze(1)
(y.float() * weight_of_row).sum().backward()
print("output:              ", y[:, 0].tolist())
print("output times 0 or 1: ", (y * weight_of_row)[:, 0].tolist())
print("gradient of the rows:", x.grad[:, 0].tolist())
if not (y[4:].isnan().all() and x.grad[4:].isnan().all()):
    sys.exit("torch has changed: grouped_mm writes the rows behind the last offset")
PYTHON
venv/bin/python run.py 2> errors || { cat errors; exit 1; }
