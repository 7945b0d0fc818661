#!/usr/bin/env bash
# torch 2.13.0: get_optimizer_state_dict of an optimizer that has made no step makes one, with
# gradients of zero and a learning rate of 0, and leaves its state behind. AdamW's step is 1 then and
# its moments are 0, so that the first real update is corrected as the second one: three quarters as
# large here. A run that writes a checkpoint before its first step, which other layouts are then
# compared from, trains otherwise than one that does not.
#
# Seen on 2026-11-30 (torch 2.13.0, Python 3.11), AdamW with a learning rate of 0.1:
#   state of an optimizer that has made no step: tensor(1.)
#   not looked at: the weight moved by -0.1000 after 1 step, -0.1999 after 2
#   looked at:     the weight moved by -0.0744 after 1 step, -0.1602 after 2
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
import sys

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def train(look):
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if look:
        state = get_optimizer_state_dict(model, optimizer)
        print("state of an optimizer that has made no step:", state["state"]["weight"]["step"])
    start, weights = model.weight[0, 0].item(), []
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        weights.append(model.weight[0, 0].item() - start)
    return weights


plain, looked_at = train(look=False), train(look=True)
for name, steps in (("not looked at", plain), ("looked at", looked_at)):
    print(f"{name + ':':14} the weight moved by {steps[0]:.4f} after 1 step, {steps[1]:.4f} after 2")
if abs(looked_at[0] - plain[0]) < 0.01:
    sys.exit("torch has changed: to read an optimizer's state no longer counts as a step")
PYTHON
venv/bin/python run.py 2> errors || { cat errors; exit 1; }
