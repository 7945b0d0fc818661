#!/usr/bin/env bash
# transformers 5.24.0 reads MiMo-V2-Flash's published config.json, which has 128 both as sliding_window
# and as sliding_window_size, as a window of 129 tokens; with sliding_window alone it is 128. What it
# saves has both, 129 and 128: two programs that read the saved folder, each by one key, differ.
#
# Seen on 2026-11-29 (transformers 5.24.0, Python 3.11):
#   sliding_window 128, sliding_window_size 128: read as 129, saved as {'sliding_window': 129, 'sliding_window_size': 128}
#   sliding_window 128:                          read as 128, saved as {'sliding_window': 128}
#
# Exits with 1 if that changes. Needs a package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import json
import sys
from pathlib import Path

from transformers import AutoConfig

KEYS = ("sliding_window", "sliding_window_size")
seen = []
for number in (2, 1):
    published = Path(f"published-{number}")
    published.mkdir()
    given = dict.fromkeys(KEYS[:number], 128)
    (published / "config.json").write_text(json.dumps({"model_type": "mimo_v2_flash", **given}))
    config = AutoConfig.from_pretrained(published)
    config.save_pretrained(f"saved-{number}")
    saved = json.loads(Path(f"saved-{number}/config.json").read_text())
    kept = {key: saved[key] for key in KEYS if key in saved}
    words = ", ".join(f"{key} {value}" for key, value in given.items())
    print(f"{words + ':':44} read as {config.sliding_window}, saved as {kept}")
    seen.append((config.sliding_window, kept))
if seen != [(129, {"sliding_window": 129, "sliding_window_size": 128}), (128, {"sliding_window": 128})]:
    sys.exit("transformers has changed: it reads or saves another window")
PYTHON
