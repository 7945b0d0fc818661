#!/usr/bin/env bash
# torch 2.13.0: on a CPU mesh each rank draws its shard of a DTensor from its own generator, as if the
# shard were the tensor. With the same seed on all ranks, which replicas need, the shards of a weight
# that fully_shard cut are copies of each other: its rows repeat, and all ranks' experts begin alike.
# A warning says that support "may not" be complete, and not what that means.
#
# Seen on 2026-11-30 (torch 2.13.0, Python 3.11, gloo), a layer of 4 x 3 after manual_seed(0):
#   one process: first column [-0.0043, -0.4249, -0.0114, 0.1528]
#   two ranks:   first column [-0.0043, -0.4249, -0.0043, -0.4249]
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
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
with torch.device("meta"):
    layer = nn.Linear(3, 4, bias=False)
fully_shard(layer)
layer.to_empty(device="cpu")
torch.manual_seed(0)
layer.reset_parameters()
whole = layer.weight.full_tensor().detach()
torch.manual_seed(0)
alone = nn.Linear(3, 4, bias=False).weight.detach()
same = torch.equal(whole[:2], whole[2:]) and not torch.equal(alone[:2], alone[2:])
if dist.get_rank() == 0:
    for name, weight in (("one process", alone), ("two ranks", whole)):
        print(f"{name + ':':12} first column", [round(value, 4) for value in weight[:, 0].tolist()])
    if not same:
        print("torch has changed: shards of a weight are drawn otherwise")
dist.barrier()
sys.stdout.flush()
os._exit(not same)  # gloo's threads may abort a process that ends as usual.
PYTHON
venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 run.py 2> errors || { cat errors; exit 1; }
