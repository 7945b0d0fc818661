#!/usr/bin/env bash
# transformers 5.24.0 loads a GGUF file of gpt-oss with its attention and routers, and draws the
# experts and the attention's sinks at random; a Mixtral, whose architecture is "llama" in GGUF
# files, becomes a dense Llama with random MLPs. from_pretrained succeeds in both cases: a report of
# missing names is all that tells. Qwen3-MoE, whose experts have the same names in files, is right.
#
# Seen on 2026-11-30 (transformers 5.24.0, gguf 0.19.0, torch 2.13.0, Python 3.11), largest
# difference of the logits from the written model's, beside the largest logit:
#   qwen3moe: Qwen3MoeForCausalLM, logits 0.00 off; drawn anew: nothing
#   gpt-oss:  GptOssForCausalLM, logits 0.91 off; drawn anew: down_proj, down_proj_bias, ..., sinks
#   llama:    LlamaForCausalLM, logits 1.06 off; drawn anew: down_proj, gate_proj, up_proj
#
# Exits with 1 if that changes. Needs a package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet \
    transformers==5.24.0 gguf==0.19.0 accelerate==1.15.0 torch==2.13.0
cd "$folder"
cat > run.py <<'PYTHON'
import sys

import gguf
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 96,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
FAMILIES = {"qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "llama": "mixtral"}
IN_FILES = {
    "gate": "ffn_gate_inp",
    "router": "ffn_gate_inp",
    "sinks": "attn_sinks.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "experts.down_proj_bias": "ffn_down_exps.bias",
}


def halves(weight, interleaved):
    """Return the gates' and the up projections' part of stacked experts."""
    if interleaved:
        return weight[..., ::2], weight[..., 1::2]
    return weight.chunk(2, dim=1)


def in_pairs(weight, heads):
    """Return the rows of a query or key weight in the order that Llama has in GGUF files."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def tensors(model, architecture):
    """Yield the names and tensors of a model's GGUF file."""
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], 2)
    transposed = architecture == "gpt-oss"
    for name, weight in model.state_dict().items():
        block = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        part = name.split("mlp.")[-1].split("self_attn.")[-1]
        kind = "bias" if name.endswith("bias") else "weight"
        if "gate_up_proj" in part:
            for word, half in zip(("gate", "up"), halves(weight, transposed), strict=True):
                flip = transposed and half.dim() == 3
                yield f"{block}ffn_{word}_exps.{kind}", half.transpose(1, 2) if flip else half
        elif part in IN_FILES:
            flip = transposed and weight.dim() == 3
            yield block + IN_FILES[part], weight.transpose(1, 2) if flip else weight
        elif part.rpartition(".")[0] in IN_FILES:
            yield f"{block}{IN_FILES[part.rpartition('.')[0]]}.{kind}", weight
        else:
            if architecture == "llama" and part in ("q_proj.weight", "k_proj.weight"):
                weight = in_pairs(weight, 4 if part[0] == "q" else 2)
            yield names.get_name(name, try_suffixes=(".weight", ".bias")), weight


def write(model, architecture):
    file, config = gguf.GGUFWriter("model.gguf", architecture), model.config
    file.add_name("small")
    file.add_vocab_size(96)
    file.add_context_length(64)
    file.add_block_count(2)
    file.add_embedding_length(256)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_expert_feed_forward_length(768)
    file.add_head_count(4)
    file.add_head_count_kv(2)
    file.add_key_length(64)
    file.add_value_length(64)
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_rope_freq_base(config.rope_parameters["rope_theta"])
    file.add_expert_count(4)
    file.add_expert_used_count(2)
    for name, tensor in tensors(model, architecture):
        file.add_tensor(name, tensor.contiguous().numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


changed = False
ids = torch.arange(10)[None]
for architecture, family in FAMILIES.items():
    torch.manual_seed(0)
    keys = AutoConfig.for_model(family).to_dict()
    config = AutoConfig.for_model(family, **{k: v for k, v in SMALL.items() if k in keys})
    model = AutoModelForCausalLM.from_config(config).eval()
    write(model, architecture)
    loaded, report = AutoModelForCausalLM.from_pretrained(
        ".", gguf_file="model.gguf", dtype=torch.float32, output_loading_info=True
    )
    with torch.no_grad():
        wanted, got = model(ids).logits, loaded.eval()(ids).logits
    off = ((got - wanted).abs().max() / wanted.abs().max()).item()
    drawn = {name.removesuffix(".weight").split(".")[-1] for name in report["missing_keys"]}
    print(
        f"{architecture + ':':9} {type(loaded).__name__}, logits {off:.2f} off; "
        f"drawn anew: {', '.join(sorted(drawn)) or 'nothing'}"
    )
    changed |= (off < 1e-4 and not drawn) != (architecture == "qwen3moe")
if changed:
    sys.exit("transformers has changed: it reads other experts of GGUF files")
PYTHON
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
venv/bin/python -W ignore run.py 2> errors || { cat errors; exit 1; }
