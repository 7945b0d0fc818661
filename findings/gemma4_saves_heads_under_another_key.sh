#!/usr/bin/env bash
# transformers 5.24.0 loads a Gemma 4 whose full-attention layers have heads of their own
# (global_head_dim, num_global_key_value_heads) and saves it without these keys: config.json then has
# per_layer_config by layer and a head_dim that is right for the other layers
# alone. A program that reads the published keys takes one head dim for all layers. The loaded
# configuration raises an error of its own for head_dim, also in getattr with a default, and has no
# global_head_dim.
#
# Seen on 2026-11-29 (transformers 5.24.0, Python 3.11):
#   given:  head_dim 256, global_head_dim 512, num_key_value_heads 8, num_global_key_value_heads 2
#   loaded: head_dim AmbiguousGlobalPerLayerAttributeError, global_head_dim AttributeError
#   saved:  head_dim 256, num_key_value_heads 8
#           per_layer_config {'5': {'head_dim': 512, 'num_key_value_heads': 2}}
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

HEADS = {
    "head_dim": 256,
    "global_head_dim": 512,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
}
PUBLISHED = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "attention_k_eq_v": True,
    **HEADS,
}


def answer(config, name):
    try:
        return str(getattr(config, name))
    except Exception as error:
        return type(error).__name__


Path("published").mkdir()
Path("published/config.json").write_text(json.dumps(PUBLISHED))
config = AutoConfig.from_pretrained("published")
config.save_pretrained("saved")
saved = json.loads(Path("saved/config.json").read_text())
answers = [answer(config, name) for name in ("head_dim", "global_head_dim")]
kept = {key: saved[key] for key in HEADS if key in saved}
print("given: ", ", ".join(f"{key} {value}" for key, value in HEADS.items()))
print(f"loaded: head_dim {answers[0]}, global_head_dim {answers[1]}")
print("saved: ", ", ".join(f"{key} {value}" for key, value in kept.items()))
print("        per_layer_config", saved.get("per_layer_config"))
wanted = {"head_dim": 256, "num_key_value_heads": 8}
layers = {"5": {"head_dim": 512, "num_key_value_heads": 2}}
errors = ["AmbiguousGlobalPerLayerAttributeError", "AttributeError"]
if (kept, saved.get("per_layer_config"), answers) != (wanted, layers, errors):
    sys.exit("transformers has changed: it saves the heads of a Gemma 4 in another way")
PYTHON
