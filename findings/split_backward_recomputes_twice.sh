#!/usr/bin/env bash
# torch 2.13.0: a checkpointed block under a pipeline schedule that splits the backward is recomputed
# twice for each microbatch, once for the gradients of its input and once more for those of its
# weights: three forwards in place of two, with all communication inside, such as the exchanges of
# experts' tokens. What the schedule saves in bubbles it pays in recomputation.
#
# Seen on 2026-11-30 (torch 2.13.0, Python 3.11, gloo), forwards of the two blocks of a rank's last stage:
#   Interleaved1F1B       runs a microbatch: rank 0 2 and 2, rank 1 2 and 2
#   InterleavedZeroBubble runs a microbatch: rank 0 3 and 3, rank 1 3 and 3
#   ZBVZeroBubble         runs a microbatch: rank 0 3 and 3, rank 1 3 and 3
#   DualPipeV             runs a microbatch: rank 0 2.25 and 2.25, rank 1 2.25 and 2.25
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
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils.checkpoint import checkpoint

DIM, BATCH, MICROBATCHES, STAGES = 8, 8, 4, 4
# The stages of both ranks.
LOOPED, FOLDED = ([0, 2], [1, 3]), ([0, 3], [1, 2])
SCHEDULES = {
    "Interleaved1F1B": LOOPED,
    "InterleavedZeroBubble": LOOPED,
    "ZBVZeroBubble": FOLDED,
    "DualPipeV": FOLDED,
}


class Block(nn.Module):
    """Counts how often its inside runs with gradients on."""

    def __init__(self):
        super().__init__()
        self.linear, self.runs = nn.Linear(DIM, DIM), 0

    def inside(self, x):
        self.runs += 1
        return x + torch.tanh(self.linear(x))

    def forward(self, x):
        return checkpoint(self.inside, x, use_reentrant=False)


def runs_a_microbatch(name):
    """Returns the runs of each block of this rank's last stage, for each microbatch of a step."""
    numbers = SCHEDULES[name][dist.get_rank()]
    modules = [nn.Sequential(Block(), Block()) for _ in numbers]
    stages = [
        PipelineStage(module, number, STAGES, torch.device("cpu"))
        for module, number in zip(modules, numbers, strict=True)
    ]
    schedule = getattr(schedules, f"Schedule{name}")(
        stages, MICROBATCHES, loss_fn=lambda y, t: ((y - t) ** 2).sum(), scale_grads=False
    )
    x, target = torch.randn(BATCH, DIM), torch.randn(BATCH, DIM)
    last = {"target": target} if STAGES - 1 in numbers else {}
    for _ in range(2):  # The first step also finds out shapes.
        for module in modules:
            for block in module:
                block.runs = 0
        schedule.step(*((x,) if 0 in numbers else ()), **last)
    return [block.runs / MICROBATCHES for block in modules[-1]]


dist.init_process_group("gloo")
torch.manual_seed(0)
seen = {}
for name in SCHEDULES:
    of_ranks = [None, None]
    dist.all_gather_object(of_ranks, runs_a_microbatch(name))
    seen[name] = of_ranks
    if dist.get_rank() == 0:
        text = ["{:g} and {:g}".format(*runs) for runs in of_ranks]
        print(f"{name:21} runs a microbatch: rank 0 {text[0]}, rank 1 {text[1]}")
    dist.barrier()
same = seen["Interleaved1F1B"] == [[2, 2]] * 2 and max(seen["InterleavedZeroBubble"][1]) > 2
if not same:
    print("torch has changed: a split backward recomputes another number of times")
sys.stdout.flush()
os._exit(not same)  # gloo's threads may abort a process that ends as usual.
PYTHON
venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 run.py 2> errors || { cat errors; exit 1; }
