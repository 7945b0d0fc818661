#!/usr/bin/env bash
# peft 0.21.2: layers_to_transform and exclude_modules choose among target_modules alone. Stacked
# experts, which target_parameters names, get adapters in every layer, without a word: more is trained,
# and saved, than was asked for.
#
# Seen on 2026-11-29 (peft 0.21.2, transformers 5.24.0, torch 2.13.0, Python 3.11), 3 layers:
#   layers_to_transform=[1]:           q_proj in layers 1; experts in layers 0, 1, 2
#   exclude_modules=.*layers.[02].*:   q_proj in layers 1; experts in layers 0, 1, 2
#
# Exits with 1 if that changes. Needs a package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet peft==0.21.2 transformers==5.24.0 torch==2.13.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import sys

from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def layers_with_adapters(**choice):
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **SMALL))
    lora = LoraConfig(
        r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"], **choice
    )
    names = [name for name, _ in get_peft_model(base, lora).named_parameters() if "lora_A" in name]
    return [
        sorted({name.split("layers.")[1].split(".")[0] for name in names if part in name})
        for part in ("q_proj", "experts")
    ]


seen = []
for words, choice in (
    ("layers_to_transform=[1]:", {"layers_to_transform": [1]}),
    ("exclude_modules=.*layers.[02].*:", {"exclude_modules": r".*layers\.[02]\..*"}),
):
    seen.append(layers_with_adapters(**choice))
    queries, experts = (", ".join(layers) for layers in seen[-1])
    print(f"{words:34} q_proj in layers {queries}; experts in layers {experts}")
if seen != 2 * [[["1"], ["0", "1", "2"]]]:
    sys.exit("peft has changed: the choice of layers reaches target_parameters")
PYTHON
