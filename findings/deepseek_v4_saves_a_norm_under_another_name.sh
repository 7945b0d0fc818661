#!/usr/bin/env bash
# transformers 5.24.0 saves the norm of DeepSeek-V4's keys under a name that published files do not
# have: layers.0.attn.norm.weight, where they, and engines that read them, say
# layers.0.attn.kv_norm.weight. All other tensors of attention get their published names back. In
# such a folder the published name is missing; transformers itself reads both names without a word.
#
# Seen on 2026-11-29 (transformers 5.24.0, torch 2.13.0, Python 3.11):
#   saved:     model.layers.0.attn.norm.weight, model.layers.0.attn.q_norm.weight
#   read back: the same weights; of a folder with the published name: the same too
#
# Exits with 1 if that changes. Needs a package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV4Config

config = DeepseekV4Config(
    vocab_size=96,
    hidden_size=32,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    head_dim=16,
    q_lora_rank=12,
    qk_rope_head_dim=8,
    n_routed_experts=8,
    num_experts_per_tok=2,
    o_groups=2,
    o_lora_rank=6,
    index_n_heads=2,
    index_head_dim=16,
    index_topk=3,
    num_hash_layers=0,
    layer_types=["sliding_attention", "sliding_attention"],
    sliding_window=10,
    hc_mult=2,
    num_nextn_predict_layers=0,
)
model = AutoModelForCausalLM.from_config(config)
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, 1, 0.1)
model.save_pretrained("model")
(file,) = Path("model").glob("*.safetensors")
tensors = load_file(file)
norms = sorted(name for name in tensors if ".layers.0.attn." in f".{name}" and "norm" in name)
print("saved:     ", ", ".join(norms))
kept = model.state_dict()["model.layers.0.self_attn.kv_norm.weight"]
again = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
same = torch.equal(again.state_dict()["model.layers.0.self_attn.kv_norm.weight"], kept)
published = {name.replace(".attn.norm.", ".attn.kv_norm."): x for name, x in tensors.items()}
save_file(published, file, metadata={"format": "pt"})
third = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
also = torch.equal(third.state_dict()["model.layers.0.self_attn.kv_norm.weight"], kept)
print("read back: ", same, "; with the published name:", also)
ends = [name.split(".attn.")[1] for name in norms]
if (ends, same, also) != (["norm.weight", "q_norm.weight"], True, True):
    sys.exit("transformers has changed: it saves other names, or reads them otherwise")
PYTHON
