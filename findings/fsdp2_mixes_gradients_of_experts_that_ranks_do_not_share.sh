#!/usr/bin/env bash
# torch 2.13.0: where several experts are one fully_shard unit and the ranks use different ones, the
# gradients of different experts are added up, without a word. Each rank leaves the parameters that it
# did not use out of the reduce-scatter, and the next one takes their place: rank 0's gradient of
# expert 0 and rank 1's of expert 1 become one sum, of which rank 0 takes its half as expert 0's and
# rank 1 as expert 1's. The other halves have no gradient. All sizes agree, so nothing fails.
# set_reduce_scatter_unused_params(True) puts zeros there, and is off if nobody asks for it.
#
# Seen on 2026-11-30 (torch 2.13.0, Python 3.11, gloo, 2 ranks; rank 0 uses expert 0, rank 1 expert 1):
#   right, the mean over two ranks: expert 0 has 1, expert 1 has 10 and expert 2 has 0
#   by default, rank 0's halves of experts 0, 1, 2: 11, none, none
#   by default, rank 1's halves of experts 0, 1, 2: none, 11, none
#   set_reduce_scatter_unused_params, rank 0's halves of experts 0, 1, 2: 1, 10, 0
#   set_reduce_scatter_unused_params, rank 1's halves of experts 0, 1, 2: 1, 10, 0
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

DIM, ROWS = 4, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(3))

    def forward(self, x, expert):
        return self.experts[expert](x)


dist.init_process_group("gloo")
rank, seen = dist.get_rank(), []
for unused in (False, True):
    layer = Layer()
    fully_shard(layer)
    if unused:
        layer.set_reduce_scatter_unused_params(True)
    x = torch.full((ROWS, DIM), 10.0**rank)  # The sum's gradient is 2 of rank 0, 20 of rank 1.
    layer(x, expert=rank).sum().backward()
    grads = [p.grad for p in layer.parameters()]
    of_ranks = [None, None]
    mine = ["none" if g is None else f"{g.to_local()[0, 0]:g}" for g in grads]
    dist.all_gather_object(of_ranks, mine)
    seen.append(of_ranks)
if rank == 0:
    print("right, the mean over two ranks: expert 0 has 1, expert 1 has 10 and expert 2 has 0")
    for name, of_ranks in zip(("by default", "set_reduce_scatter_unused_params"), seen, strict=True):
        for number, grads in enumerate(of_ranks):
            print(f"{name}, rank {number}'s halves of experts 0, 1, 2: {', '.join(grads)}")
same = seen == [[["11", "none", "none"], ["none", "11", "none"]], [["1", "10", "0"]] * 2]
if not same:
    print("torch has changed: gradients of parameters that one rank uses are other ones")
dist.barrier()
sys.stdout.flush()
os._exit(not same)  # gloo's threads may abort a process that ends as usual.
PYTHON
venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 run.py 2> errors || { cat errors; exit 1; }
