#!/usr/bin/env bash
# transformers 5.24.0: position_ids that begin again at 0 keep packed documents apart in Qwen3-MoE,
# Mixtral and most others. gpt-oss, AFMoE and Granite's hybrid build their masks without them: each
# document attends to all before it, in training too, and nothing is said. This is so with eager and
# SDPA attention; flash-attention kernels read the positions by themselves and were not run.
#
# Seen on 2026-11-30 (transformers 5.24.0, torch 2.13.0, Python 3.11), two documents of 9 and 15
# tokens, largest difference of the second one's logits from those of the document alone, beside the
# largest logit, without a cache; granitemoehybrid with attention layers alone:
#   qwen3_moe        sdpa  less than 0.00001
#   gpt_oss          eager 1.29
#   afmoe            sdpa  1.35
#   granitemoehybrid sdpa  1.63
#
# Exits with 1 if that changes. Needs a package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 16,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "qwen3_moe": {},
    "gpt_oss": {},
    "afmoe": {"num_dense_layers": 1},
    "granitemoehybrid": {
        "layer_types": 4 * ["full_attention"],
        "position_embedding_type": "rope",
        "mamba_n_heads": 4,
    },
}

torch.manual_seed(0)
tokens = torch.randint(3, 96, (1, 24))
starts_again = torch.cat([torch.arange(9), torch.arange(15)])[None]
meet = []
for family, more in FAMILIES.items():
    keys = AutoConfig.for_model(family).to_dict()
    small = {key: value for key, value in SMALL.items() if key in keys}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **small, **more))
    with torch.no_grad():
        alone = model(tokens[:, 9:], use_cache=False).logits
        packed = model(tokens, position_ids=starts_again, use_cache=False).logits[:, 9:]
    off = ((packed - alone).abs().max() / alone.abs().max()).item()
    words = "less than 0.00001" if off < 1e-5 else f"{off:.2f}"
    print(f"{family:16} {model.config._attn_implementation:5} {words}")
    meet.append(off > 0.1)
if meet != [False, True, True, True]:
    sys.exit("transformers has changed: other families keep packed documents apart")
PYTHON
