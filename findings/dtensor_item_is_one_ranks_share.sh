#!/usr/bin/env bash
# torch 2.13.0: .item(), float(), int() and bool() of a sum, norm, maximum or mean of a sharded
# DTensor return what the rank's own shard gives, another number on each rank, and say nothing: the
# result stays unreduced (Partial) until an operation asks for the whole, and these do not. A norm
# that is logged or held against a bound, a flag that decides on a step, a count of an expert's
# tokens are each rank's own. full_tensor() before them gives the whole, and so does a comparison of
# tensors.
#
# Seen on 2026-11-30 (torch 2.13.0, Python 3.11, gloo, 2 ranks), ones and a 4 in six places, three a
# rank:
#   x.sum().full_tensor().item()   on ranks 0 and 1: 7.0 and 7.0
#   x.sum().item()                 on ranks 0 and 1: 3.0 and 4.0
#   float(x.norm())                on ranks 0 and 1: 1.73 and 4.0
#   x.max().item()                 on ranks 0 and 1: 1.0 and 4.0
#   x.mean().item()                on ranks 0 and 1: 1.0 and 1.3333333730697632
#   (x > 0).sum().item()           on ranks 0 and 1: 3 and 1
#   (x.sum() > 6).item()           on ranks 0 and 1: True and True
#   bool((x > 3).any())            on ranks 0 and 1: False and True
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

ROWS = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 4.0])


def run(rank, world):
    meet = f"file://{os.getcwd()}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
    x = distribute_tensor(ROWS, init_device_mesh("cpu", (world,)), [Shard(0)])
    seen = {
        "x.sum().full_tensor().item()": x.sum().full_tensor().item(),
        "x.sum().item()": x.sum().item(),
        "float(x.norm())": round(float(x.norm()), 2),
        "x.max().item()": x.max().item(),
        "x.mean().item()": x.mean().item(),
        "(x > 0).sum().item()": (x > 0).sum().item(),
        "(x.sum() > 6).item()": (x.sum() > 6).item(),
        "bool((x > 3).any())": bool((x > 3).any()),
    }
    everyone = [None] * world
    dist.all_gather_object(everyone, seen)
    if rank == 0:
        for name in seen:
            print(f"{name:30} on ranks 0 and 1: {everyone[0][name]} and {everyone[1][name]}")
        apart = [name for name in seen if everyone[0][name] != everyone[1][name]]
        if apart != [name for name in seen if "full_tensor" not in name and "> 6" not in name]:
            sys.exit("torch has changed: other scalars of sharded tensors differ between ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.start_processes(run, (2,), 2, start_method="fork")
PYTHON
venv/bin/python -W ignore run.py 2> errors || { cat errors; exit 1; }
