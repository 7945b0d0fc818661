#!/usr/bin/env bash
# transformers 5.24.0, trl 1.16.0: with label_smoothing_factor the Trainer and the SFTTrainer leave
# a mixture-of-experts model's balance loss out of what they train, whatever output_router_logits
# and router_aux_loss_coef say; nothing tells. The SFTTrainer goes on logging aux_loss beside the
# loss, and so looks as if it trained it. Without smoothing both train it.
#
# Seen on 2026-11-30 (transformers 5.24.0, trl 1.16.0, torch 2.13.0, Python 3.11), one step of SGD,
# largest difference of the routers' weights between a coefficient of 1 and of 0, and the losses of
# both:
#   Trainer     smoothing 0.0: routers differ by 1.4e-02, loss 6.560 and 4.557, logged None
#   Trainer     smoothing 0.1: routers differ by 0.0e+00, loss 4.558 and 4.558, logged None
#   SFTTrainer  smoothing 0.0: routers differ by 1.4e-02, loss 6.560 and 4.557, logged 2.003
#   SFTTrainer  smoothing 0.1: routers differ by 0.0e+00, loss 4.558 and 4.558, logged 2.003
#
# Exits with 1 if that changes. Needs a package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export HF_HOME="$folder/cache" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet trl==1.16.0 transformers==5.24.0 torch==2.13.0
cd "$folder"
cat > run.py <<'PYTHON'
import sys

import datasets
import torch
from tokenizers import Tokenizer, models
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "output_router_logits": True,
}
ONE_STEP = {
    "output_dir": "out",
    "max_steps": 1,
    "per_device_train_batch_size": 4,
    "learning_rate": 1.0,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0,
    "report_to": [],
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
}
datasets.disable_progress_bars()
words = {f"w{number}": number for number in range(96)}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
    pad_token="w0",
    unk_token="w0",
    eos_token="w2",
)
torch.manual_seed(0)
rows = torch.randint(3, 96, (4, 16)).tolist()
data = datasets.Dataset.from_dict({"input_ids": rows, "labels": rows})


def train(name, coefficient, smoothing):
    torch.manual_seed(1)
    config = Qwen3MoeConfig(**SMALL, router_aux_loss_coef=coefficient)
    model = Qwen3MoeForCausalLM(config)
    if name == "Trainer":
        arguments = TrainingArguments(**ONE_STEP, label_smoothing_factor=smoothing)
        trainer = Trainer(model, arguments, train_dataset=data)
    else:
        arguments = SFTConfig(
            **ONE_STEP,
            label_smoothing_factor=smoothing,
            router_aux_loss_coef=coefficient,
            bf16=False,
            gradient_checkpointing=False,
        )
        trainer = SFTTrainer(
            model,
            arguments,
            train_dataset=data.remove_columns("labels"),
            processing_class=tokenizer,
        )
    trainer.train()
    routers = [p.detach().flatten() for n, p in model.named_parameters() if "gate.weight" in n]
    return torch.cat(routers), trainer.state.log_history[0]


changed = False
for name in ("Trainer", "SFTTrainer"):
    for smoothing in (0.0, 0.1):
        (with_it, log), (without, log_without) = (train(name, c, smoothing) for c in (1.0, 0.0))
        off, aux = (with_it - without).abs().max().item(), log.get("aux_loss")
        print(
            f"{name:11} smoothing {smoothing}: routers differ by {off:.1e}, "
            f"loss {log['loss']:.3f} and {log_without['loss']:.3f}, "
            f"logged {aux and round(aux, 3)}",
            file=sys.stderr,
        )
        changed |= (off > 0) != (smoothing == 0) or (aux is None) != (name == "Trainer")
if changed:
    sys.exit("a trainer has changed: it trains the balance loss beside smoothed labels")
PYTHON
venv/bin/python -W ignore run.py > log 2> errors || { cat errors; exit 1; }
grep smoothing errors
