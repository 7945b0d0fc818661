#!/usr/bin/env bash
# torch 2.13.0: pipeline schedules that split the backward put the gradients of weights into .grad
# themselves, so that register_post_accumulate_grad_hook's hooks are not called for them. How often
# they are called depends on the schedule and on the rank, between always and never, while all
# gradients are right: an optimizer step or a reduction in such a hook works under Interleaved1F1B, and
# trains some stages alone under the others.
#
# Seen on 2026-11-30 (torch 2.13.0, Python 3.11, gloo), 2 stages a rank with a weight each, 4 microbatches:
#   Interleaved1F1B       calls on ranks 0 and 1: 8, 8; gradients right
#   InterleavedZeroBubble calls on ranks 0 and 1: 4, 0; gradients right
#   ZBVZeroBubble         calls on ranks 0 and 1: 4, 0; gradients right
#   DualPipeV             calls on ranks 0 and 1: 7, 6; gradients right
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

DIM, BATCH, MICROBATCHES, STAGES = 8, 8, 4, 4
# The stages of both ranks.
LOOPED, FOLDED = ([0, 2], [1, 3]), ([0, 3], [1, 2])
SCHEDULES = {
    "Interleaved1F1B": LOOPED,
    "InterleavedZeroBubble": LOOPED,
    "ZBVZeroBubble": FOLDED,
    "DualPipeV": FOLDED,
}


def stage_module(number):
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(DIM, DIM, bias=False), nn.Tanh())


def step(name):
    """Returns the calls of hooks on this rank, and whether its gradients are right."""
    numbers, calls = SCHEDULES[name][dist.get_rank()], 0

    def count(parameter):
        nonlocal calls
        calls += 1

    modules = [stage_module(number) for number in numbers]
    for module in modules:
        module[0].weight.register_post_accumulate_grad_hook(count)
    stages = [
        PipelineStage(module, number, STAGES, torch.device("cpu"))
        for module, number in zip(modules, numbers, strict=True)
    ]
    schedule = getattr(schedules, f"Schedule{name}")(
        stages, MICROBATCHES, loss_fn=lambda y, t: ((y - t) ** 2).sum(), scale_grads=False
    )
    torch.manual_seed(100)
    x, target = torch.randn(BATCH, DIM), torch.randn(BATCH, DIM)
    last = {"target": target} if STAGES - 1 in numbers else {}
    schedule.step(*((x,) if 0 in numbers else ()), **last)
    whole = nn.Sequential(*(stage_module(number) for number in range(STAGES)))
    ((whole(x) - target) ** 2).sum().backward()
    pairs = [(m[0].weight.grad, whole[n][0].weight.grad) for m, n in zip(modules, numbers, strict=True)]
    return calls, all(torch.allclose(one, other, atol=1e-5) for one, other in pairs)


dist.init_process_group("gloo")
seen = {}
for name in SCHEDULES:
    of_ranks = [None, None]
    dist.all_gather_object(of_ranks, step(name))
    calls, right = zip(*of_ranks, strict=True)
    seen[name] = calls
    if dist.get_rank() == 0:
        gradients = "right" if all(right) else "wrong"
        print(f"{name:21} calls on ranks 0 and 1: {calls[0]}, {calls[1]}; gradients {gradients}")
    dist.barrier()
same = seen["Interleaved1F1B"] == (8, 8) and seen["InterleavedZeroBubble"][1] == 0
if not same:
    print("torch has changed: a split backward calls hooks of gradients")
sys.stdout.flush()
os._exit(not same)  # gloo's threads may abort a process that ends as usual.
PYTHON
venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 run.py 2> errors || { cat errors; exit 1; }
