#!/usr/bin/env bash
# torch 2.13.0: HuggingFaceStorageWriter with enable_consolidation=True writes 0 in the place of every
# tensor without dims, such as the scale of a float8 weight or of a router, and says nothing. The
# shards that it joins hold the value, and so does a folder that is written without consolidation.
# A tensor of shape [1] is right.
#
# Seen on 2026-11-29 (torch 2.13.0, safetensors 0.8.0, Python 3.11):
#   saved:                 scale 3.0, vector [3.0]
#   without consolidation: scale 3.0, vector [3.0]
#   consolidated:          scale 0.0, vector [3.0]
#
# Exits with 1 if that changes. Needs a package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 safetensors==0.8.0 numpy
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

saved = {"scale": torch.tensor(3.0), "vector": torch.tensor([3.0])}
seen = [saved]
for name, consolidate in (("plain", False), ("consolidated", True)):
    writer = dcp.HuggingFaceStorageWriter(
        name, save_distributed=consolidate, enable_consolidation=consolidate
    )
    dcp.save(dict(saved), storage_writer=writer, no_dist=True)
    (file,) = Path(name).glob("*.safetensors")
    seen.append(load_file(file))
words = ("saved:", "without consolidation:", "consolidated:")
for word, tensors in zip(words, seen, strict=True):
    print(f"{word:22} scale {tensors['scale'].item()}, vector {tensors['vector'].tolist()}")
if [tensors["scale"].item() for tensors in seen] != [3.0, 3.0, 0.0]:
    sys.exit("torch has changed: it consolidates tensors without dims in another way")
PYTHON
