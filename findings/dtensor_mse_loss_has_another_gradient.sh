#!/usr/bin/env bash
# torch 2.13.0: F.mse_loss and F.smooth_l1_loss of DTensors whose rows are sharded give gradients
# that are as many times too large as there are ranks, while the loss is right: as in a distillation
# or a value head under sequence parallelism. Where the rows do not divide evenly the loss is
# another one too, that of F.binary_cross_entropy_with_logits as well: a mean of the ranks' means.
# The mean of squares that is written out is right in all cases. Nothing is said.
#
# Seen on 2026-11-30 (torch 2.13.0, Python 3.11, gloo, 2 ranks), relative to the same in one
# process:
#   8 rows: written out     loss 1.00, gradient 1.00
#   8 rows: mse_loss        loss 1.00, gradient 2.00
#   8 rows: smooth_l1_loss  loss 1.00, gradient 2.00
#   8 rows: bce_with_logits loss 1.00, gradient 1.00
#   7 rows: written out     loss 1.00, gradient 1.00
#   7 rows: mse_loss        loss 0.93, gradient 1.88
#   7 rows: smooth_l1_loss  loss 0.95, gradient 1.98
#   7 rows: bce_with_logits loss 0.99, gradient 1.00
#
# Exits with 1 if that changes. Needs a package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMP_NUM_THREADS=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cd "$folder"
cat > run.py <<'PYTHON'
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

LOSSES = {
    "written out": lambda x, y: (x - y).square().mean(),
    "mse_loss": F.mse_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "bce_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
}


def run(rank, world):
    meet = f"file://{os.getcwd()}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    off = {}
    for rows in (8, 7):
        x, y = torch.randn(2, rows, 6, generator=torch.Generator().manual_seed(0)).unbind()
        for name, loss in LOSSES.items():
            seen = []
            for whole in (True, False):
                a, b = (t if whole else distribute_tensor(t, mesh, [Shard(0)]) for t in (x, y))
                a = a.detach().requires_grad_()
                value = loss(a, b)
                value.backward()
                both = value, a.grad
                seen.append(both if whole else [t.full_tensor() for t in both])
            (right, gradient), (value, other) = seen
            off[rows, name] = (value / right).item(), (other.norm() / gradient.norm()).item()
    if rank == 0:
        for (rows, name), (value, gradient) in off.items():
            print(f"{rows} rows: {name:15} loss {value:.2f}, gradient {gradient:.2f}")
        wrong = {name for name in LOSSES if off[8, name][1] > 1.9}
        uneven = {name for name in LOSSES if abs(off[7, name][0] - 1) > 1e-3}
        if wrong != {"mse_loss", "smooth_l1_loss"} or uneven != set(LOSSES) - {"written out"}:
            sys.exit("torch has changed: other losses of sharded rows differ from whole ones")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.start_processes(run, (2,), 2, start_method="fork")
PYTHON
venv/bin/python -W ignore run.py 2> errors || { cat errors; exit 1; }
