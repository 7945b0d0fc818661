#!/usr/bin/env bash
# heavyball 3.2.1 and pytorch-optimizer 4.1.0: Muon takes a weight of stacked experts [experts, out,
# in] for a filter and makes one row of each expert, [experts, out * in], which it orthogonalises.
# The singular values of an expert's update, which Muon is there to make equal, differ fivefold; the
# update is about a sixth of what the expert gets alone, and depends on the other experts'
# gradients. muon-optimizer 0.1.0, the original, takes each expert for itself; torch.optim.Muon
# refuses.
#
# Seen on 2026-11-30 (torch 2.13.0, Python 3.11), one step with lr 0.01, 4 experts of 32 x 16,
# singular values of the first one's update, and how far it moves if another expert's gradient
# changes:
#   muon-optimizer     stacked 0.0096 to 0.0162; alone 0.0096 to 0.0162; moves by 0 %
#   heavyball          stacked 0.0008 to 0.0043; alone 0.0140 to 0.0148; moves by 62 %
#   pytorch-optimizer  stacked 0.0006 to 0.0036; alone 0.0097 to 0.0160; moves by 74 %
#
# Exits with 1 if that changes. Needs a package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet heavyball==3.2.1 pytorch-optimizer==4.1.0 torch==2.13.0
"$folder/venv/bin/pip" install --quiet --no-deps muon-optimizer==0.1.0
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import sys

import heavyball
import pytorch_optimizer
import torch
from muon import SingleDeviceMuon

heavyball.utils.compile_mode = None
PACKAGES = {
    "muon-optimizer": lambda weights: SingleDeviceMuon(weights, lr=0.01),
    "heavyball": lambda weights: heavyball.Muon(weights, lr=0.01),
    "pytorch-optimizer": lambda weights: pytorch_optimizer.Muon(
        [{"params": weights, "use_muon": True}], lr=0.01
    ),
}


def update_of_first(make, gradient):
    start = 0.02 * torch.randn(gradient.shape, generator=torch.Generator().manual_seed(1))
    weight = torch.nn.Parameter(start.clone())
    weight.grad = gradient.clone()
    make([weight]).step()
    return (start - weight.detach()).reshape(-1, 32, 16)[0]


torch.manual_seed(0)
gradient = torch.randn(4, 32, 16)
other = torch.cat([gradient[:1], gradient[:1] + 0.5 * gradient[1:2], gradient[2:]])
joined = []
for name, make in PACKAGES.items():
    stacked, alone = update_of_first(make, gradient), update_of_first(make, gradient[0])
    ranges = [torch.linalg.svdvals(update) for update in (stacked, alone)]
    moved = (update_of_first(make, other) - stacked).norm() / stacked.norm()
    words = [f"{values.min():.4f} to {values.max():.4f}" for values in ranges]
    print(f"{name:18} stacked {words[0]}; alone {words[1]}; moves by {100 * moved:.0f} %")
    joined.append(bool(ranges[0].max() < 0.5 * ranges[1].min() and moved > 0.1))
if joined != [False, True, True]:
    sys.exit("an optimizer has changed: it joins the experts, or keeps them apart, as it did not")
PYTHON
