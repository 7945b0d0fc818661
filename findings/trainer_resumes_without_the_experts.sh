#!/usr/bin/env bash
# transformers 5.24.0: the Trainer writes checkpoints with a tensor for each expert, as published,
# and loads them by the model's own names, whose experts are stacked. Training that is resumed, and
# load_best_model_at_end, leave the experts as they are: those of the base model, or of the last
# step, beside everything else of the checkpoint and its optimizer. Two warnings of missing and
# unexpected keys are all that tells; Mixtral's routers are left too. gpt-oss, stacked in files as
# well, is right, and so is from_pretrained of the same folder.
#
# Seen on 2026-11-30 (transformers 5.24.0, accelerate 1.15.0, torch 2.13.0, Python 3.11), weights
# that are not the checkpoint's, the first two of each:
#   qwen3_moe: resumed at step 2 with other experts.down_proj, experts.gate_up_proj (of the base: True)
#   qwen3_moe: the best of 4 steps, of step 2, with other experts.down_proj, experts.gate_up_proj
#   mixtral:   resumed at step 2 with other gate.weight, experts.down_proj (of the base: True)
#   mixtral:   the best of 4 steps, of step 2, with other gate.weight, experts.down_proj
#   gpt_oss:   resumed at step 2 with other nothing
#   gpt_oss:   the best of 4 steps, of step 2, with other nothing
#
# Exits with 1 if that changes. Needs a package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 accelerate==1.15.0 torch==2.13.0
cd "$folder"
cat > run.py <<'PYTHON'
import sys

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
ROWS = [{"input_ids": row, "labels": row} for row in (torch.arange(96) * 7 % 96).view(8, 12)]


class Begin(TrainerCallback):
    """Keeps the weights with which training begins, behind the loading of a checkpoint."""

    def on_train_begin(self, args, state, control, model, **others):
        self.step = state.global_step
        self.weights = {name: weight.clone() for name, weight in model.state_dict().items()}


def trainer(base, begin, **choice):
    arguments = TrainingArguments(
        base + "_run",
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        learning_rate=0.002,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        **choice,
    )
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return Trainer(model, arguments, train_dataset=ROWS, eval_dataset=ROWS, callbacks=[begin])


def others(weights, wanted):
    names = [name for name in wanted if not torch.equal(weights[name], wanted[name])]
    return sorted({name.split("mlp.")[-1] for name in names}, key=len)


changed = False
for family in ("qwen3_moe", "mixtral", "gpt_oss"):
    torch.manual_seed(0)
    keys = AutoConfig.for_model(family).to_dict()
    config = AutoConfig.for_model(family, **{k: v for k, v in SMALL.items() if k in keys})
    AutoModelForCausalLM.from_config(config).save_pretrained(family)
    first = trainer(
        family,
        Begin(),
        load_best_model_at_end=True,
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="eval_loss",
        greater_is_better=True,
    )
    first.train()
    folder = f"{family}_run/checkpoint-2"
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    base = AutoModelForCausalLM.from_pretrained(family, dtype=torch.float32).state_dict()
    begin = Begin()
    trainer(family, begin).train(resume_from_checkpoint=folder)
    resumed, best = others(begin.weights, saved), others(first.model.state_dict(), saved)
    of_base = all(
        torch.equal(begin.weights[name], base[name])
        for name in base
        if any(name.endswith(part) for part in resumed)
    )
    words = f" (of the base: {of_base})" if resumed else ""
    name = f"{family}:"
    print(
        f"{name:10} resumed at step {begin.step} "
        f"with other {', '.join(resumed[:2]) or 'nothing'}{words}"
    )
    print(
        f"{name:10} the best of 4 steps, of step {first.state.best_model_checkpoint[-1]}, "
        f"with other {', '.join(best[:2]) or 'nothing'}"
    )
    expected = {
        "qwen3_moe": ["experts.down_proj", "experts.gate_up_proj"],
        "mixtral": ["experts.down_proj", "experts.gate_up_proj", "gate.weight"],
        "gpt_oss": [],
    }[family]
    changed |= sorted(resumed) != expected or sorted(best) != expected or not of_base
if changed:
    sys.exit("transformers has changed: its Trainer loads other weights of a checkpoint")
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 venv/bin/python -W ignore run.py > lines 2> errors ||
    { cat lines errors; exit 1; }
grep -v "^{'" lines
