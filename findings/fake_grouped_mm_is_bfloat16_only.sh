#!/usr/bin/env bash
# torch 2.13.0: torch.nn.functional.grouped_mm runs in float32, float16 and bfloat16, but its rule for
# shapes, which the meta device, fake tensors and torch.compile ask, accepts bfloat16 alone. A model
# in float32 that trains on a CPU cannot be built on meta or traced to see what it would need.
#
# Seen on 2026-11-30 (torch 2.13.0, Python 3.11):
#   torch.bfloat16: eager runs; meta: runs; fake: runs
#   torch.float32: eager runs; meta: Expected inputs of BF16 type but ; fake: Expected inputs of BF16 type but
#   torch.float16: eager runs; meta: Expected inputs of BF16 type but ; fake: Expected inputs of BF16 type but
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
import logging
import sys

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

logging.disable()


def run(dtype, device):
    x, weights = (torch.ones(shape, dtype=dtype, device=device) for shape in ((8, 16), (2, 16, 16)))
    offsets = torch.tensor([4, 8], dtype=torch.int32, device=device)
    try:
        return "runs" if F.grouped_mm(x, weights, offs=offsets).shape == (8, 16) else "another shape"
    except RuntimeError as error:
        return str(error)[:33]


seen = []
for dtype in (torch.bfloat16, torch.float32, torch.float16):
    seen.append((run(dtype, "cpu"), run(dtype, "meta")))
    with FakeTensorMode(allow_non_fake_inputs=True):
        seen[-1] += (run(dtype, "cpu"),)
    print(f"{dtype}: eager {seen[-1][0]}; meta: {seen[-1][1]}; fake: {seen[-1][2]}")
refused = ("runs", *["Expected inputs of BF16 type but "] * 2)
if seen != [("runs",) * 3, refused, refused]:
    sys.exit("torch has changed: grouped_mm's shapes are known for other types too")
PYTHON
venv/bin/python run.py 2> errors || { cat errors; exit 1; }
