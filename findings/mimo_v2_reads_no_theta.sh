#!/usr/bin/env bash
# transformers 5.24.0 reads MiMo-V2-Flash's published keys rope_theta, swa_rope_theta,
# partial_rotary_factor, layernorm_epsilon and hybrid_layer_pattern into nothing: whatever they say,
# the model has the published model's values, which are defaults of the code. A model that was
# trained on with another base of its positions, or with other layers of the near past, is loaded
# as the published one, without a warning. Positions are read from rope_parameters alone, the kinds
# of layers from layer_types, the epsilon from rms_norm_eps.
#
# Seen on 2026-11-29 (transformers 5.24.0, Python 3.11):
#   given: rope_theta 20000000, swa_rope_theta 50000, layernorm_epsilon 0.001, all layers near
#   read:  full 5000000.0, near 10000.0, epsilon 1e-05, 9 of 48 layers see the whole past
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

GIVEN = {
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": 48,
    "hybrid_layer_pattern": [1] * 48,
    "rope_theta": 20_000_000,
    "swa_rope_theta": 50_000,
    "layernorm_epsilon": 1e-3,
}
Path("model").mkdir()
Path("model/config.json").write_text(json.dumps(GIVEN))
config = AutoConfig.from_pretrained("model")
bases = [config.rope_parameters[f"{kind}_attention"]["rope_theta"] for kind in ("full", "sliding")]
full = config.layer_types.count("full_attention")
print(f"read:  full {bases[0]}, near {bases[1]}, epsilon {config.rms_norm_eps}, {full} of 48 layers see the whole past")
if (bases, config.rms_norm_eps, full) != ([5e6, 1e4], 1e-5, 9):
    sys.exit("transformers has changed: it reads other values")
PYTHON
