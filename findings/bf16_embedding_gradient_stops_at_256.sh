#!/usr/bin/env bash
# torch 2.13.0 on a CPU adds the gradients of equal ids of a bfloat16 embedding in bfloat16, one after
# another: after 256 ones the sum stays at 256, whatever follows. A frequent token's embedding gets a
# fraction of its gradient. The product with a one-hot matrix, which is the same function, is right.
#
# Seen on 2026-11-29 (torch 2.13.0, Python 3.11), gradient of one id that occurs N times:
#   N = 256:   embedding 256, index 256, one-hot product 256
#   N = 4096:  embedding 256, index 256, one-hot product 4096
#   N = 65536: embedding 256, index 256, one-hot product 65536
#
# Exits with 1 if that changes. Needs a package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
import torch.nn.functional as F

WAYS = {
    "embedding": F.embedding,
    "index": lambda ids, table: table[ids],
    "one-hot product": lambda ids, table: F.one_hot(ids, len(table)).to(table.dtype) @ table,
}
seen = []
for number in (256, 4096, 65536):
    ids, found = torch.zeros(number, dtype=torch.long), {}
    for name, way in WAYS.items():
        table = torch.zeros(4, 8, dtype=torch.bfloat16, requires_grad=True)
        way(ids, table).sum().backward()
        found[name] = int(table.grad[0, 0])
    seen.append(list(found.values()))
    print(f"N = {number}:".ljust(10), ", ".join(f"{name} {sum_}" for name, sum_ in found.items()))
if seen != [[256, 256, 256], [256, 256, 4096], [256, 256, 65536]]:
    sys.exit("torch has changed: it adds the gradients of a bfloat16 embedding in another way")
PYTHON
