#!/usr/bin/env bash
# transformers 5.24.0: where a float8 folder in DeepSeek-V3's form is dequantized, on a CPU or by
# FineGrainedFP8Config(dequantize=True), the block of a scale is not weight_block_size of the config,
# but the rows divided by the number of scales. If the last block is partial and the division comes
# out even, scales reach rows and columns of other blocks without a word: blocks of 128 and 64 are
# read as two of 96. If it does not, loading ends with an error, as for the 576 rows of DeepSeek-V3's
# own kv_a_proj_with_mqa.
#
# Seen on 2026-11-30 (transformers 5.24.0, torch 2.13.0, Python 3.11), largest relative errors of
# weights in blocks of 128 x 128 whose later rows are larger:
#   all sizes multiples of 128: largest relative error 0.00
#   kv_a_proj_with_mqa of 192 rows: 0.18
#   experts of 192 channels: gate_proj 0.22, down_proj 0.03
#   kv_a_proj_with_mqa of 576 rows, as in DeepSeek-V3: RuntimeError
#
# Exits with 1 if that changes. Needs a package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 accelerate==1.15.0 torch==2.13.0
cd "$folder"
cat > run.py <<'PYTHON'
import json
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.utils import logging

logging.set_verbosity(logging.CRITICAL)
logging.disable_progress_bar()
BLOCK = 128
SMALL = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}


def in_float8(weight):
    """Return a weight's values in float8, the scales of its blocks, and what both mean."""
    rows, columns = weight.shape
    scales = torch.zeros(-(-rows // BLOCK), -(-columns // BLOCK))
    small, meant = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn), torch.zeros(rows, columns)
    for i, j in ((i, j) for i in range(scales.shape[0]) for j in range(scales.shape[1])):
        place = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
        scales[i, j] = weight[place].abs().max() / 448
        small[place] = (weight[place] / scales[i, j]).to(small.dtype)
        meant[place] = small[place].float() * scales[i, j]
    return small, scales, meant


def errors(**sizes):
    """Return the relative error of each float8 weight after it was loaded and dequantized."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("deepseek_v3", **SMALL, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained("folder")
    tensors, meant = load_file("folder/model.safetensors"), {}
    for name, weight in list(tensors.items()):
        if "_proj" in name:
            rising = weight * torch.linspace(1, 8, len(weight))[:, None]
            tensors[name], tensors[f"{name}_scale_inv"], meant[name] = in_float8(rising)
    save_file(tensors, "folder/model.safetensors", {"format": "pt"})
    entries = json.load(open("folder/config.json"))
    entries["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    json.dump(entries, open("folder/config.json", "w"))
    model = AutoModelForCausalLM.from_pretrained(
        "folder", dtype=torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    model.save_pretrained("back")
    back = load_file("back/model.safetensors")
    return {name: ((back[name] - w).norm() / w.norm()).item() for name, w in meant.items()}


def largest(found, part):
    return max(error for name, error in found.items() if part in name)


whole = max(errors(kv_lora_rank=64, moe_intermediate_size=256).values())
print(f"all sizes multiples of 128: largest relative error {whole:.2f}")
narrow = errors(kv_lora_rank=128, moe_intermediate_size=192)
latent, gate, down = (
    largest(narrow, part) for part in ("kv_a_proj", "experts.0.gate", "experts.0.down")
)
print(f"kv_a_proj_with_mqa of 192 rows: {latent:.2f}")
print(f"experts of 192 channels: gate_proj {gate:.2f}, down_proj {down:.2f}")
try:
    errors(kv_lora_rank=512, moe_intermediate_size=256)
    refused = False
except RuntimeError as error:
    refused = True
    print(f"kv_a_proj_with_mqa of 576 rows, as in DeepSeek-V3: {type(error).__name__}")
if whole > 1e-6 or min(latent, gate, down) < 0.01 or not refused:
    sys.exit("transformers has changed: it reads partial blocks of float8 weights otherwise")
PYTHON
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
venv/bin/python -W ignore run.py 2> errors || { cat errors; exit 1; }
