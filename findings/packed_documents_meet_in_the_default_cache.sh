#!/usr/bin/env bash
# transformers 5.24.0 keeps packed documents, told apart by position_ids that begin again at 0, from
# seeing each other if no cache is made. A model's config asks for one (use_cache=true) in training
# too, so that a plain call in a loop of one's own lets every document attend to those before it,
# with the positions of a document alone, and says nothing. The Trainer sets use_cache=False by
# itself.
#
# Seen on 2026-11-30 (transformers 5.24.0, torch 2.13.0, Python 3.11), two documents of 9 and 15
# tokens, largest difference of the second one's logits from those of the document alone, beside the
# largest logit:
#   qwen3_moe  model(tokens, position_ids): 1.22; with use_cache=False less than 0.00001
#   mixtral    model(tokens, position_ids): 1.14; with use_cache=False less than 0.00001
#   minimax_m2 model(tokens, position_ids): 0.90; with use_cache=False less than 0.00001
#   olmoe      model(tokens, position_ids): 1.37; with use_cache=False less than 0.00001
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
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

torch.manual_seed(0)
tokens = torch.randint(3, 96, (1, 24))
starts_again = torch.cat([torch.arange(9), torch.arange(15)])[None]
changed = False
for family in ("qwen3_moe", "mixtral", "minimax_m2", "olmoe"):
    keys = AutoConfig.for_model(family).to_dict()
    config = AutoConfig.for_model(family, **{k: v for k, v in SMALL.items() if k in keys})
    model = AutoModelForCausalLM.from_config(config).train()
    with torch.no_grad():
        alone = model(tokens[:, 9:], use_cache=False).logits
        off = []
        for choice in ({}, {"use_cache": False}):
            packed = model(tokens, position_ids=starts_again, **choice).logits[:, 9:]
            off.append(((packed - alone).abs().max() / alone.abs().max()).item())
    print(
        f"{family:10} model(tokens, position_ids): {off[0]:.2f}; "
        f"with use_cache=False {'less than 0.00001' if off[1] < 1e-5 else f'{off[1]:.2f}'}"
    )
    changed |= off[0] < 0.1 or off[1] > 1e-5
if changed:
    sys.exit("transformers has changed: a cache no longer decides what documents see")
PYTHON
