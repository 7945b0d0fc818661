#!/usr/bin/env bash
# torch 2.13.0: FSDP2 with reshard_after_forward=True below a pipeline schedule that splits the
# backward (InterleavedZeroBubble, ZBVZeroBubble, DualPipeV) computes wrong gradients, or none, of the
# first rank's last stage, and says nothing: the half that makes the gradients of weights looks the
# parameters up in the module, whose gathered ones are gone by then. With reshard_after_forward=False
# they are right, and so they are with schedules whose backward is whole.
#
# Seen on 2026-11-29 (torch 2.13.0, Python 3.11), norms of the gradient of one weight of the last stage
# of rank 0, of 2 stages a rank on 2 x 2 ranks (pipeline x FSDP, gloo):
#   Interleaved1F1B         kept 0.9251, freed 0.9251
#   InterleavedZeroBubble   kept 0.9251, freed 1.0540
#   ZBVZeroBubble           kept 3.3438, freed none
#   DualPipeV               kept 3.3438, freed 5.9857
#
# Exits with 1 if that changes. Needs a package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/run.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules

DIM, BATCH, MICROBATCHES = 8, 8, 4
# The stages of both ranks of the pipeline.
LOOPED, FOLDED = ([0, 2], [1, 3]), ([0, 3], [1, 2])
SCHEDULES = {
    "Interleaved1F1B": LOOPED,
    "InterleavedZeroBubble": LOOPED,
    "ZBVZeroBubble": FOLDED,
    "DualPipeV": FOLDED,
}


def stage_module(stage):
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))


def gradient_norm(name, mesh, free):
    """Norm of a gradient of this rank's last stage after one step; "none" without a gradient."""
    numbers = SCHEDULES[name][mesh["pp"].get_local_rank()]
    modules = [stage_module(number) for number in numbers]
    for module in modules:
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=free)
    group, cpu = mesh["pp"].get_group(), torch.device("cpu")
    stages = [
        PipelineStage(module, number, 4, cpu, group=group)
        for module, number in zip(modules, numbers, strict=True)
    ]
    schedule = getattr(schedules, f"Schedule{name}")(
        stages, MICROBATCHES, loss_fn=lambda y, t: ((y - t) ** 2).sum(), scale_grads=False
    )
    torch.manual_seed(100)
    x, target = torch.randn(BATCH, DIM), torch.randn(BATCH, DIM)
    inputs = (x,) if 0 in numbers else ()
    schedule.step(*inputs, **({"target": target} if 3 in numbers else {}))
    grad = modules[-1][0].weight.grad
    return "none" if grad is None else f"{grad.full_tensor().norm().item():.4f}"


dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
right = []
for name in SCHEDULES:
    kept, freed = (gradient_norm(name, mesh, free) for free in (False, True))
    right.append(kept == freed)
    if rank == 0:
        print(f"{name:23} kept {kept}, freed {freed}", flush=True)
    dist.barrier()
dist.destroy_process_group()
if rank == 0 and right != [True, False, False, False]:
    sys.exit("torch has changed: gradients of a split backward are right where parameters are freed")
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --nproc-per-node 4 --log-dir "$folder" --redirects 2 \
    "$folder/run.py"
