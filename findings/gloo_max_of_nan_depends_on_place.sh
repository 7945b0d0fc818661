#!/usr/bin/env bash
# torch 2.13.0: all_reduce with MAX over gloo keeps or drops a NaN by the rank that has it and by the
# element's place in the tensor. Of a million equal elements on two ranks, the first becomes NaN and
# the last does not, or the other way round: a maximum of gradients that is tested for NaN finds it
# on some layouts alone.
#
# Seen on 2026-11-29 (torch 2.13.0, Python 3.11), two ranks:
#   NaN on rank 0: one element nan; of a million the first nan, the last 1.0
#   NaN on rank 1: one element 0.0; of a million the first 0.0, the last nan
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

dist.init_process_group("gloo")
rank, seen = dist.get_rank(), []
for broken in range(2):
    ends = []
    for size in (1, 1_000_000):
        x = torch.full((size,), float("nan") if rank == broken else float(rank))
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        ends += [x[0].item(), x[-1].item()]
    seen.append([end != end for end in ends[1:]])
    if rank == 0:
        one, first, last = ends[1:]
        print(f"NaN on rank {broken}: one element {one}; of a million the first {first}, the last {last}")
dist.destroy_process_group()
if rank == 0 and seen != [[True, True, False], [False, False, True]]:
    sys.exit("torch has changed: the maximum of a NaN over gloo is another")
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --nproc-per-node 2 --log-dir "$folder" --redirects 2 \
    "$folder/run.py"
