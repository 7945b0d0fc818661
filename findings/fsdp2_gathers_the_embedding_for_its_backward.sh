#!/usr/bin/env bash
# torch 2.13.0: fully_shard gathers an embedding's whole weight a second time for the backward, where
# its gradient needs the tokens alone and nothing reads the weight. While the first layer computes its
# gradients, the largest matrix of many models lies beside it: 1.2 GB in bfloat16 for a vocabulary of
# 152 k and a dim of 4,096. reshard_after_forward=False for that unit spares the traffic, and holds
# the memory through all layers instead.
#
# Seen on 2026-11-30 (torch 2.13.0, Python 3.11, gloo, 2 ranks):
#   forward:  1 gather of the embedding's weight
#   backward: 1 gather of the embedding's weight
#
# Exits with 1 if that changes. Needs a package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cd "$folder"
cat > two_ranks.py <<'PYTHON'
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

VOCABULARY, DIM = 1000, 8


class Gathers(TorchDispatchMode):
    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "allgather" in func.__name__ or "all_gather" in func.__name__:
            whole = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
            self.found += whole.numel() == VOCABULARY * DIM
        return func(*args, **(kwargs or {}))


dist.init_process_group("gloo")
model = nn.Sequential(nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 3))
for unit in model:
    fully_shard(unit, reshard_after_forward=True)
fully_shard(model)
tokens = torch.arange(10)
with Gathers() as forward:
    loss = model(tokens).sum()
with Gathers() as backward:
    loss.backward()
if dist.get_rank() == 0:
    print(f"forward:  {forward.found} gather of the embedding's weight")
    print(f"backward: {backward.found} gather of the embedding's weight")
same = (forward.found, backward.found) == (1, 1)
if not same:
    print("torch has changed: it gathers the embedding another number of times")
dist.barrier()
sys.stdout.flush()
os._exit(not same)  # gloo's threads may abort a process that ends as usual.
PYTHON
venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 two_ranks.py 2> errors || { cat errors; exit 1; }
