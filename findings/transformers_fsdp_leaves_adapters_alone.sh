#!/usr/bin/env bash
# transformers 5.24.0, peft 0.21.2: an adapter on a model that from_pretrained sharded by
# DistributedConfig(fsdp_size=2) is a plain tensor that nothing reduces. In a loop of one's own each rank
# trains its own adapter on its own rows, from its own draw, without a word; the loss falls on both. The
# Trainer alone averages adapters' gradients and hands out rank 0's draw.
#
# Seen on 2026-11-30 (torch 2.13.0, Python 3.11), norms of one adapter's gradient on ranks 0 and 1, with
# the same adapter and other rows on each rank, and which of them is sharded:
#   fsdp_size=2, then get_peft_model:        0.0733 0.1011, adapter sharded: False
#   get_peft_model, then fully_shard (right): 0.0647 0.0647, adapter sharded: True
#
# Exits with 1 if that changes. Needs a package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet peft==0.21.2 transformers==5.24.0 torch==2.13.0 numpy
cat > "$folder/run.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"


def adapted(model):
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))


def norms(model):
    """Norms of both ranks' gradient of an adapter after a backward on other rows."""
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(96, (2, 16))
    model(input_ids=tokens, labels=tokens).loss.backward()
    grad = dict(model.named_parameters())[NAME].grad
    sharded = isinstance(grad, DTensor)
    found = [torch.zeros(()) for _ in range(2)]
    dist.all_gather(found, (grad.full_tensor() if sharded else grad).norm())
    return [f"{norm.item():.4f}" for norm in found], sharded


dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[1]
if rank == 0:
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **SMALL)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
dist.barrier()
native = AutoModelForCausalLM.from_pretrained(
    folder, distributed_config=DistributedConfig(fsdp_size=2)
)
own = fully_shard(adapted(AutoModelForCausalLM.from_pretrained(folder)))
seen = []
for words, model in (
    ("fsdp_size=2, then get_peft_model:", adapted(native)),
    ("get_peft_model, then fully_shard (right):", own),
):
    found, sharded = norms(model)
    seen.append((len({*found}), sharded))
    if rank == 0:
        print(f"{words:41} {' '.join(found)}, adapter sharded: {sharded}", flush=True)
dist.destroy_process_group()
if seen != [(2, False), (1, True)]:
    sys.exit("transformers has changed: adapters of a model it sharded are reduced")
PYTHON
OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$folder/venv/bin/torchrun" --nproc-per-node 2 --log-dir "$folder" \
    --redirects 2 "$folder/run.py" "$folder/model"
