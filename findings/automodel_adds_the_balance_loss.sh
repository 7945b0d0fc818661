#!/usr/bin/env bash
# nemo-automodel 0.7.0: its Qwen3-MoE adds the balance loss's gradient to the router with the
# router_aux_loss_coef of config.json, 0.001 in every published one, whatever output_router_logits says;
# transformers adds it for output_router_logits=true alone. The loss that is printed leaves it out, so two
# fine-tunings of one folder differ from the first step with equal losses. Coefficient 0 turns it off.
#
# Seen on 2026-11-30 (nemo-automodel 0.7.0, transformers 5.24.0, torch 2.13.0, Python 3.11), loss and
# difference of a router's gradient from transformers' with the default config:
#   coefficient 0.001: loss 4.567323 (4.567323), gradient of the router 12 % off
#   coefficient 0:     loss 4.567323 (4.567323), gradient of the router 0 % off
#
# Exits with 1 if that changes. Needs a package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 numpy safetensors
# Without what it needs for GPUs.
"$folder/venv/bin/pip" install --quiet --no-deps nemo-automodel==0.7.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder/model" <<'PYTHON'
import sys
from pathlib import Path

import torch
from nemo_automodel.components.models.common.utils import BackendConfig
from nemo_automodel.components.models.qwen3_moe.model import Qwen3MoeForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

CONFIG = Qwen3MoeConfig(
    vocab_size=96,
    hidden_size=32,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    num_experts=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
)
CONFIG.torch_dtype = "float32"
# The constructor names a CUDA device; nothing is put there.
torch.cuda.current_device = lambda: 0


def automodel(folder, coefficient):
    CONFIG.router_aux_loss_coef = coefficient
    backend = BackendConfig(
        attn="sdpa",
        linear="torch",
        rms_norm="torch",
        experts="torch",
        dispatcher="torch",
        rope_fusion=False,
        enable_hf_state_dict_adapter=True,
    )
    model = Qwen3MoeForCausalLM.from_config(CONFIG, backend=backend)
    model.model.rotary_emb.device = torch.device("cpu")
    weights = load_file(Path(folder, "model.safetensors"))
    model.load_state_dict(model.state_dict_adapter.from_hf(weights))
    return model.float().train()


def loss_and_gradient(model):
    torch.manual_seed(1)
    tokens, targets = torch.randint(96, (2, 64)), torch.randint(96, (2, 64))
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.item(), dict(model.named_parameters())["model.layers.0.mlp.gate.weight"].grad


default = CONFIG.router_aux_loss_coef
torch.manual_seed(0)
transformers = AutoModelForCausalLM.from_config(CONFIG, attn_implementation="eager").train()
transformers.save_pretrained(sys.argv[1])
right_loss, right = loss_and_gradient(transformers)
seen = []
for coefficient in (default, 0.0):
    loss, gradient = loss_and_gradient(automodel(sys.argv[1], coefficient))
    off = ((gradient - right).norm() / right.norm()).item()
    seen.append((abs(loss - right_loss) < 1e-5, off > 0.01))
    name = f"coefficient {coefficient:g}:"
    print(f"{name:18} loss {loss:.6f} ({right_loss:.6f}), gradient of the router {off:.0%} off")
if seen != [(True, True), (True, False)]:
    sys.exit("Automodel has changed: output_router_logits=false leaves the balance loss out")
PYTHON
