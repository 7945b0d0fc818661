#!/usr/bin/env bash
# transformers 5.24.0 ties the output of a Kimi Linear to its embedding in no case: with
# tie_word_embeddings = true in config.json the model says that it is tied, and draws, trains and
# saves an output of its own. A folder that leaves lm_head.weight out because config.json ties it gets
# a random output.
#
# Seen on 2026-11-29 (torch 2.13.0, Python 3.11):
#   kimi_linear: config.tie_word_embeddings=True, the same tensor: False
#   qwen3_moe:   config.tie_word_embeddings=True, the same tensor: True
#
# Exits with 1 if that changes. Needs a package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import sys

from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
seen = []
for kind in ("kimi_linear", "qwen3_moe"):
    config = AutoConfig.for_model(kind, **SMALL, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config)
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    seen.append((model.config.tie_word_embeddings, tied))
    print(f"{kind}: config.tie_word_embeddings={seen[-1][0]}, the same tensor: {tied}")
if seen != [(True, False), (True, True)]:
    sys.exit("transformers has changed: it ties a Kimi Linear, or says that it does not")
PYTHON
