"""compare.py's second peer: the same model in `transformers`, trained by its own Trainer.

    python trainer_rank.py JOB.json

Runs in an environment of its own, so it imports nothing of titan_moe. The job names the folder of
a config.json, the text, the tokenizer, and what else runs.py's `trainer` writes. Weights are drawn
by transformers' rule. Records are joined by the end-of-document token and cut into sequences;
what the Trainer leaves open is left at its default.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job["model"]))
    print(f"size: {sum(p.numel() for p in model.parameters()):,} total parameters", flush=True)
    Trainer(
        model=model,
        args=arguments(job),
        train_dataset=Sequences(job),
        callbacks=[Steps()],
    ).train()


def arguments(job: dict[str, Any]) -> TrainingArguments:
    """As both other programs are configured."""
    return TrainingArguments(
        output_dir=job["folder"],
        use_cpu=True,
        bf16=job["dtype"] == "bfloat16",
        max_steps=job["steps"],
        per_device_train_batch_size=job["batch_size"],
        learning_rate=job["lr"],
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=1.0,
        warmup_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


class Sequences(Dataset):
    """All records of the text, in equal pieces."""

    def __init__(self, job: dict[str, Any]) -> None:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(job["tokenizer"])
        tokens: list[int] = []
        for file in sorted(Path(job["data"]).glob("*.jsonl")):
            for line in file.read_text(encoding="utf-8").splitlines():
                tokens += [*tokenizer.encode(json.loads(line)["text"]), tokenizer.eos_token_id]
        length = job["seq_len"]
        whole = len(tokens) // length * length
        self._tokens_NS = torch.tensor(tokens[:whole]).view(-1, length)

    def __len__(self) -> int:
        return len(self._tokens_NS)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens_NS[number], "labels": self._tokens_NS[number]}


class Steps(TrainerCallback):
    """A line for each step, as runs.py reads it."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            print(f"step: {state.global_step} loss: {float(logs['loss']):.5f}", flush=True)


if __name__ == "__main__":
    main()
