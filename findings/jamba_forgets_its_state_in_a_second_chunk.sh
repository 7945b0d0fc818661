#!/usr/bin/env bash
# transformers 5.24.0: a Jamba that gets more tokens beside its cache, several at once, begins its
# Mamba layers anew: the second chunk of a long prompt, the answers scored behind a shared prefix
# and a conversation's next turn see the past in the attention layers alone. No error, no warning.
# Token by token, and in the other hybrids of the table, the result is that of the whole sequence.
#
# Seen on 2026-11-30 (transformers 5.24.0, torch 2.13.0, Python 3.11), largest difference of the
# last 11 of 24 tokens' logits from those of one forward, beside the largest logit:
#   jamba            11 tokens at once: 0.39; token by token: less than 0.0001
#   granitemoehybrid 11 tokens at once: less than 0.0001; token by token: less than 0.0001
#   minimax          11 tokens at once: less than 0.0001; token by token: less than 0.0001
#   qwen3_next       11 tokens at once: less than 0.0001; token by token: less than 0.0001
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
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_mamba_kernels": False,
}
MORE = {
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "mamba_dt_rank": 4},
    "granitemoehybrid": {
        "layer_types": 3 * ["linear_attention"] + ["full_attention"],
        "mamba_n_heads": 4,
    },
    "minimax": {},
    "qwen3_next": {},
}

torch.manual_seed(0)
tokens = torch.randint(3, 96, (1, 24))
wrong = []
for family, more in MORE.items():
    keys = AutoConfig.for_model(family).to_dict()
    small = {key: value for key, value in SMALL.items() if key in keys}
    config = AutoConfig.for_model(family, **small, **more)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits[:, 13:]
        off = []
        for size in (11, 1):
            past = model(tokens[:, :13], use_cache=True).past_key_values
            chunks = []
            for chunk in tokens[:, 13:].split(size, dim=1):
                seen = model(chunk, past_key_values=past, use_cache=True)
                past = seen.past_key_values
                chunks.append(seen.logits)
            off.append(((torch.cat(chunks, 1) - whole).abs().max() / whole.abs().max()).item())
    words = ["less than 0.0001" if one < 1e-4 else f"{one:.2f}" for one in off]
    print(f"{family:16} 11 tokens at once: {words[0]}; token by token: {words[1]}")
    wrong.append([one > 0.02 for one in off])
if wrong != [[True, False], *3 * [[False, False]]]:
    sys.exit("transformers has changed: other models forget what came before a chunk")
PYTHON
