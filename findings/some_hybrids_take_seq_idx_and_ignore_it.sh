#!/usr/bin/env bash
# transformers 5.24.0: DataCollatorWithFlattening(return_seq_idx, return_flash_attn_kwargs) says
# where packed documents begin in four ways. Jamba, MiniMax and Zaya take all of them and let the
# states of their recurrent layers and convolutions run over every boundary, in training, without a
# word; Nemotron-H and Qwen3-Next refuse them where the kernels that they need are missing.
# position_ids alone, which is all that the collator gives by default, are ignored by the recurrent
# layers of all five.
#
# Seen on 2026-11-30 (transformers 5.24.0, torch 2.13.0, Python 3.11), two documents of 9 and 15
# tokens, largest difference of the second one's logits from those of the document alone, beside the
# largest logit, without a cache, in PyTorch's own operations:
#   jamba      position_ids 0.93 off; all four 0.93 off
#   minimax    position_ids 1.19 off; all four 1.19 off
#   zaya       position_ids 1.21 off; all four 1.21 off
#   nemotron_h position_ids 0.88 off; all four `mamba_split_conv1d_scan_combined` can't keep
#   qwen3_next position_ids 1.21 off; all four `causal_conv1d_fn` can't keep packed sequence
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
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening

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
    "n_routed_experts": 4,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_mamba_kernels": False,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_dt_rank": 4,
    "n_groups": 1,
}
TWO = {"num_experts_per_tok": 2}
FAMILIES = {
    "jamba": TWO | {"attn_layer_offset": 1, "attn_layer_period": 2},
    "minimax": TWO,
    "zaya": {"num_experts_per_tok": 1},
    "nemotron_h": TWO,
    "qwen3_next": TWO,
}

torch.manual_seed(0)
documents = [{"input_ids": torch.randint(3, 96, (length,)).tolist()} for length in (9, 15)]
everything = {"return_seq_idx": True, "return_flash_attn_kwargs": True}
meet, refuse = [], []
for family, more in FAMILIES.items():
    keys = AutoConfig.for_model(family).to_dict()
    small = {key: value for key, value in SMALL.items() if key in keys}
    config = AutoConfig.for_model(family, **small, **more)
    model = AutoModelForCausalLM.from_config(config).train()
    words = []
    for name, choice in (("position_ids", {}), ("all four", everything)):
        batch = DataCollatorWithFlattening(return_tensors="pt", **choice)(documents)
        batch.pop("labels")
        try:
            with torch.no_grad():
                alone = model(batch["input_ids"][:, 9:], use_cache=False).logits
                packed = model(**batch, use_cache=False).logits[:, 9:]
        except ValueError as error:
            words.append(f"{name} {str(error)[:45]}")
            refuse.append((family, name))
            continue
        off = ((packed - alone).abs().max() / alone.abs().max()).item()
        words.append(f"{name} {off:.2f} off")
        if off > 0.02:
            meet.append((family, name))
    print(f"{family:10} " + "; ".join(words))
some = [(family, "all four") for family in ("jamba", "minimax", "zaya")]
if set(meet) != {*((family, "position_ids") for family in FAMILIES), *some} or len(refuse) != 2:
    sys.exit("transformers has changed: other models keep packed documents apart")
PYTHON
