#!/usr/bin/env bash
# torch 2.13.0: F.linear_cross_entropy in chunks adds up the loss of bfloat16 inputs in bfloat16, also
# with acc_policy="accurate" and acc_dtype=torch.float32, which concern gradients. Once the sum is
# large beside a chunk's share it grows no more, or by too much: the mean loss of a vocabulary's head
# is 8 % too small here, far more than bfloat16 rounds, and depends on the number of chunks.
#
# Seen on 2026-11-30 (torch 2.13.0, Python 3.11), dim 64, vocabulary 8,192, mean over the tokens:
#    1024 tokens: 9.02 in float32; in bfloat16 9.00 at once, 8.25 by default options, 9.00 with acc_dtype=float32
#    8192 tokens: 9.02 in float32; in bfloat16 9.00 at once, 8.25 by default options, 8.25 with acc_dtype=float32
#   16384 tokens: 9.02 in float32; in bfloat16 9.00 at once, 8.25 by default options, 8.25 with acc_dtype=float32
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

DIM, VOCABULARY = 64, 8192

accurate = nn.LinearCrossEntropyOptions(
    batch_chunk_size=64, acc_policy="accurate", acc_dtype=torch.float32
)
changed = False
for tokens in (1024, 8192, 16384):
    torch.manual_seed(0)
    x = torch.randn(tokens, DIM).bfloat16()
    weight = (0.02 * torch.randn(VOCABULARY, DIM)).bfloat16()
    target = torch.randint(0, VOCABULARY, (tokens,))
    right = F.cross_entropy(x.float() @ weight.float().T, target).item()
    whole = F.cross_entropy(x @ weight.T, target).item()
    x.requires_grad_()
    default = F.linear_cross_entropy(x, weight, target, options=nn.LinearCrossEntropyOptions())
    chunks = F.linear_cross_entropy(x, weight, target, options=accurate)
    print(
        f"{tokens:5} tokens: {right:.2f} in float32; in bfloat16 {whole:.2f} at once, "
        f"{default.item():.2f} by default options, {chunks.item():.2f} with acc_dtype=float32"
    )
    changed = tokens == 16384 and abs(chunks.item() - right) < 0.5
if changed:
    sys.exit("torch has changed: the loss of chunks is summed in a wider type")
PYTHON
venv/bin/python run.py 2> errors || { cat errors; exit 1; }
