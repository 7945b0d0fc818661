#!/usr/bin/env bash
# transformers 5.24.0 runs the Mamba layers of a Nemotron-H with two different steps: over a whole
# sequence the step is at least time_step_min (0.001 in published models), token by token with a cache
# it has no lower limit. Where a head's step is smaller, generation is another model than training.
# time_step_limit, which published config.json files have, changes nothing in either.
#
# Seen on 2026-11-29 (transformers 5.24.0, torch 2.13.0, Python 3.11), last logits of 24 tokens:
#   step 0.69: token by token less than 0.0001 off; with time_step_limit [0.5, 0.6] 0.0 off
#   step 4.5e-05: token by token 0.65 off; with time_step_limit [0.5, 0.6] 0.0 off
#
# Exits with 1 if that changes. Needs a package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore - 2> "$folder/warnings" <<'PYTHON' || { cat "$folder/warnings" >&2; exit 1; }
import math
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "layers_block_type": ["mamba", "attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 16,
}
HEADS, TOKENS = SMALL["mamba_num_heads"], torch.arange(24)[None]


def model_with_step(step, **keys):
    """A model in float64 all of whose steps are `step`."""
    config = AutoConfig.for_model("nemotron_h", **SMALL, **keys)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.5)
            if name.endswith("dt_bias"):
                parameter.fill_(math.log(math.expm1(step)))  # softplus of it is the step.
            if name.endswith("A_log"):
                parameter.zero_()
            if name.endswith("in_proj.weight"):
                parameter[-HEADS:].zero_()
    return model


@torch.no_grad()
def difference(step):
    model, cache = model_with_step(step), None
    whole = model(TOKENS).logits[:, -1]
    for token in TOKENS.split(1, dim=1):
        result = model(token, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
    limited = model_with_step(step, time_step_limit=(0.5, 0.6))(TOKENS).logits[:, -1]
    return [(each - whole).abs().max().item() for each in (result.logits[:, -1], limited)]


seen = []
for step in (math.log(2), math.log1p(math.exp(-10.0))):
    by_token, limited = difference(step)
    seen += [by_token < 1e-4, limited == 0]
    off = "less than 0.0001" if by_token < 1e-4 else f"{by_token:.2f}"
    print(f"step {step:.2g}: token by token {off} off; with time_step_limit [0.5, 0.6] {limited} off")
if seen != [True, True, False, True]:
    sys.exit("transformers has changed: the steps of a Nemotron-H are others")
PYTHON
