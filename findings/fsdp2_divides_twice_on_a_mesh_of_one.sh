#!/usr/bin/env bash
# torch 2.13.0: FSDP2 divides gradients by set_gradient_divide_factor(f) once in bfloat16 and float32,
# and by f twice in float16 and float64, if the mesh that the module is sharded over has one rank. This
# is what expert parallelism makes where every expert lives on one rank, as in transformers 5.24.0's
# DistributedConfig(fsdp_size=2, ep_size=2): experts' gradients are f times too small in float16, and no
# loss shows it. With set_force_sum_reduction_for_comms(True) they are so in every type.
#
# Seen on 2026-11-30 (torch 2.13.0, Python 3.11), gradient of a sum of 1s with factor 4 (0.25 is right):
#   mesh of 1: float32 0.25, bfloat16 0.25, float16 0.0625, float64 0.0625, float32 by sums 0.0625
#   mesh of 2: float32 by sums 0.25, float16 0.25, float64 0.25
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

FACTOR = 4.0


def gradient(mesh, dtype, sums=False):
    """Gradient of sum(x W), where the x of the ranks of the mesh add up to ones."""
    layer = nn.Linear(4, 4, bias=False).to(dtype)
    fully_shard(layer, mesh=mesh)
    layer.set_gradient_divide_factor(FACTOR)
    layer.set_force_sum_reduction_for_comms(sums)
    layer(torch.full((1, 4), 1 / mesh.size(), dtype=dtype)).sum().backward()
    return layer.weight.grad.full_tensor()[0, 0].item()


dist.init_process_group("gloo")
of_one = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "fsdp"))["fsdp"]
of_two = init_device_mesh("cpu", (2,))
alone = [gradient(of_one, each) for each in (torch.float32, torch.bfloat16)]
alone += [gradient(of_one, each) for each in (torch.float16, torch.float64)]
alone.append(gradient(of_one, torch.float32, sums=True))
both = [gradient(of_two, torch.float32, sums=True)]
both += [gradient(of_two, each) for each in (torch.float16, torch.float64)]
names = ("float32", "bfloat16", "float16", "float64", "float32 by sums")
others = ("float32 by sums", "float16", "float64")
if dist.get_rank() == 0:
    print("mesh of 1:", ", ".join(f"{n} {v:g}" for n, v in zip(names, alone, strict=True)))
    print("mesh of 2:", ", ".join(f"{n} {v:g}" for n, v in zip(others, both, strict=True)))
dist.destroy_process_group()
if alone != [0.25, 0.25, 0.0625, 0.0625, 0.0625] or both != [0.25, 0.25, 0.25]:
    sys.exit("torch has changed: a mesh of one divides once in every type")
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --nproc-per-node 2 --log-dir "$folder" --redirects 2 \
    "$folder/run.py"
