#!/usr/bin/env bash
# transformers 5.24.0, compressed-tensors 0.20.1: experts of an NVFP4 folder (nvfp4-pack-quantized)
# are loaded without their weight_global_scale, by which the scales of blocks are divided: they
# come out some ten thousand times too large. Attention is right. This is so with dequantize=True
# and by default; no key is reported, and the model runs.
#
# Seen on 2026-11-30 (transformers 5.24.0, compressed-tensors 0.20.1, torch 2.13.0, Python 3.11),
# norms of weights relative to what compressed-tensors itself makes of the same tensors:
#   dequantize=True: q_proj 1.00 times, an expert's down_proj 38879 times as large; keys reported: 0
#   by default:      q_proj 1.00 times, an expert's down_proj 38879 times as large; keys reported: 0
#
# Exits with 1 if that changes. Needs a package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet \
    transformers==5.24.0 compressed-tensors==0.20.1 accelerate==1.15.0 torch==2.13.0
cd "$folder"
cat > run.py <<'PYTHON'
import json
import sys

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig

FORM = "nvfp4-pack-quantized"
SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
weights = QuantizationArgs(
    num_bits=4,
    type="float",
    symmetric=True,
    strategy="tensor_group",
    group_size=16,
    scale_dtype=torch.float8_e4m3fn,
)
scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=FORM)
compressor = BaseCompressor.get_value_from_registry(FORM)


def in_nvfp4(weight):
    """Return a weight's tensors in a folder, and the weight that they stand for."""
    whole = generate_gparam(weight.min(), weight.max())
    blocks = weight.view(len(weight), -1, 16)
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), weights, global_scale=whole)
    entries = {"weight": weight, "weight_scale": scale, "weight_global_scale": whole}
    small = compressor.compress(entries, scheme)
    return small, compressor.decompress(dict(small), scheme)["weight"].float()


torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **SMALL))
model.save_pretrained("folder")
tensors, meant = load_file("folder/model.safetensors"), {}
for name in [name for name in tensors if "_proj" in name]:
    small, meant[name] = in_nvfp4(tensors.pop(name))
    prefix = name.removesuffix("weight")
    tensors.update({prefix + part: tensor.contiguous() for part, tensor in small.items()})
save_file(tensors, "folder/model.safetensors", {"format": "pt"})
entries = json.load(open("folder/config.json"))
entries["quantization_config"] = {
    "quant_method": "compressed-tensors",
    "format": FORM,
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
}
json.dump(entries, open("folder/config.json", "w"))

changed = False
layer, ids = "model.layers.0.", torch.arange(10)[None]
for words, choice in (
    ("dequantize=True", {"quantization_config": CompressedTensorsConfig(dequantize=True)}),
    ("by default", {}),
):
    model, report = AutoModelForCausalLM.from_pretrained(
        "folder", dtype=torch.bfloat16, output_loading_info=True, **choice
    )
    model(ids)
    state = model.state_dict()
    query = state[layer + "self_attn.q_proj.weight"].float()
    down = state[layer + "mlp.experts.down_proj"][2].float()
    ratios = [
        (query.norm() / meant[layer + "self_attn.q_proj.weight"].norm()).item(),
        (down.norm() / meant[layer + "mlp.experts.2.down_proj.weight"].norm()).item(),
    ]
    reported = sum(len(names) for names in report.values())
    print(
        f"{words + ':':16} q_proj {ratios[0]:.2f} times, "
        f"an expert's down_proj {ratios[1]:.0f} times as large; keys reported: {reported}"
    )
    changed |= abs(ratios[0] - 1) > 0.01 or ratios[1] < 100 or reported > 0
if changed:
    sys.exit("transformers has changed: experts in NVFP4 are loaded otherwise")
PYTHON
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
venv/bin/python -W ignore run.py 2> errors || { cat errors; exit 1; }
