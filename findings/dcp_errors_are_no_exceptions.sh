#!/usr/bin/env bash
# torch 2.13.0: what torch.distributed.checkpoint raises for a checkpoint that it cannot load is no
# Exception: CheckpointException derives from BaseException. A program that tries the newest folder in
# `try: ... except Exception:` and goes back to an older one ends instead, as do logging and clean-up
# of that form.
#
# Seen on 2026-11-30 (torch 2.13.0, Python 3.11):
#   a key that is not there: passes `except Exception`: CheckpointException of BaseException
#   another shape: passes `except Exception`: CheckpointException of BaseException
#   a folder that is not there: passes `except Exception`: CheckpointException of BaseException
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
import tempfile
import warnings

import torch
import torch.distributed.checkpoint as dcp

warnings.simplefilter("ignore")  # One process, without a process group.
folder, seen = tempfile.mkdtemp(), []
dcp.save({"weight": torch.ones(2)}, checkpoint_id=folder)
wanted = {
    "a key that is not there": {"router": torch.ones(2)},
    "another shape": {"weight": torch.ones(3)},
    "a folder that is not there": {"weight": torch.ones(2)},
}
for name, state in wanted.items():
    place = folder if "folder" not in name else f"{folder}/step-7"
    try:
        try:
            dcp.load(state, checkpoint_id=place)
        except Exception:
            seen.append("caught by `except Exception`")
    except BaseException as error:
        kinds = " of ".join(kind.__name__ for kind in type(error).__mro__[:2])
        seen.append(f"passes `except Exception`: {kinds}")
    print(f"{name}: {seen[-1]}")
if not all("BaseException" in each for each in seen):
    sys.exit("torch has changed: errors of loading are Exceptions")
PYTHON
venv/bin/python run.py 2> errors || { cat errors; exit 1; }
