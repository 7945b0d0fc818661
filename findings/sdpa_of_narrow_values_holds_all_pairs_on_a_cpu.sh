#!/usr/bin/env bash
# torch 2.13.0: scaled_dot_product_attention on a CPU makes the matrix of all pairs of tokens where v
# has fewer channels than q and k, as in latent attention (192 and 128), and says nothing; with equal
# channels it works in blocks. Values that are padded with zeros, whose result is the same in the
# channels that were there, take the blocks again, at less than a thirtieth of the memory.
#
# Seen on 2026-11-30 (torch 2.13.0, Python 3.11), causal, float32:
#   4 heads of 192 channels, 4096 tokens, v of 192 channels: 13 MiB more
#   4 heads of 192 channels, 4096 tokens, v of 128 channels: 667 MiB more
#   4 heads of 192 channels, 4096 tokens, v of 128, padded with zeros to 192: 18 MiB more
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
import resource
import subprocess
import sys

CODE = """
import resource, sys, torch
import torch.nn.functional as F
torch.set_num_threads(1)
width, padded = int(sys.argv[1]), len(sys.argv) > 2
q, k = torch.randn(2, 1, 4, 4096, 192)
v = torch.randn(1, 4, 4096, width)
F.scaled_dot_product_attention(q[:, :, :64], k[:, :, :64], v[:, :, :64], is_causal=True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if padded:
    v = F.pad(v, (0, 192 - width))
y = F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., :width]
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
seen = {}
for name, arguments in {
    "v of 192 channels": ["192"],
    "v of 128 channels": ["128"],
    "v of 128, padded with zeros to 192": ["128", "padded"],
}.items():
    seen[name] = int(subprocess.check_output([sys.executable, "-c", CODE, *arguments]))
    print(f"4 heads of 192 channels, 4096 tokens, {name}: {seen[name]} MiB more")
equal, narrow, padded = seen.values()
if not (equal < 128 and padded < 128 and narrow >= 256):
    sys.exit("torch has changed: narrow values take as little memory as wide ones")
PYTHON
venv/bin/python run.py 2> errors || { cat errors; exit 1; }
