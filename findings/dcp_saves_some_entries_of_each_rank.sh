#!/usr/bin/env bash
# torch 2.13.0: torch.distributed.checkpoint takes an entry that every rank has, and that is no
# DTensor, from the rank that has least to write so far, whatever the values are. State that differs by
# rank, as a position in the data or a generator's, comes back as a mixture: some entries are one
# rank's, some another's, the same mixture on all ranks. Neither saving nor loading says so. Names that
# contain the rank prevent it.
#
# Seen on 2026-11-30 (torch 2.13.0, Python 3.11, gloo, 2 ranks), tensors of 4 numbers:
#   rank 0 loads position of rank 0, generator of rank 1, documents of rank 0, tokens of rank 1
#   rank 1 loads position of rank 0, generator of rank 1, documents of rank 0, tokens of rank 1
# and the same of lists.
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
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

NAMES = ("position", "generator", "documents", "tokens")

dist.init_process_group("gloo")
rank = dist.get_rank()
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
state = {name: torch.full((4,), rank) for name in NAMES}
state |= {f"{name} as a list": [rank] * 4 for name in NAMES}
dcp.save(state, checkpoint_id=folder[0])
loaded = {name: torch.full((4,), -1) for name in NAMES}
loaded |= {f"{name} as a list": None for name in NAMES}
dcp.load(loaded, checkpoint_id=folder[0])
seen = {name: int(value[0]) for name, value in loaded.items()}
of_ranks = [None, None]
dist.all_gather_object(of_ranks, seen)
same = of_ranks[0] == of_ranks[1] and list(of_ranks[0].values()) == [0, 1] * 4
if rank == 0:
    for number, values in enumerate(of_ranks):
        for kind in (NAMES, [f"{name} as a list" for name in NAMES]):
            print(f"rank {number} loads", ", ".join(f"{n} of rank {values[n]}" for n in kind))
    if not same:
        print("torch has changed: entries of one name are saved by other ranks")
dist.barrier()
sys.stdout.flush()
os._exit(not same)  # gloo's threads may abort a process that ends as usual.
PYTHON
venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 run.py 2> errors || { cat errors; exit 1; }
