"""transformers on CPU ranks: native parallelism of from_pretrained, alone and in its Trainer.

python transformers_step.py OUT MODELS [REGEX]    MODELS: Hugging Face folders of tiny.py
"""

import sys
from functools import partial
from pathlib import Path

import tiny
import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig

LAYOUTS = (
    "",
    "fsdp=2",
    "tp=2",
    "tp=2,ep=2",
    "fsdp=2,ep=2",
    "dp_replicate=2",
    "fsdp=4",
    "fsdp=4,ep=4",
    "fsdp=4,ep=2",
    "fsdp=2,tp=2",
    "fsdp=2,tp=2,ep=2",
    "fsdp=2,tp=2,ep=4",
    "dp_replicate=2,fsdp=2",
    "dp_replicate=2,fsdp=2,ep=2",
)
ADAM = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0}


def load(model_folder, layout, dtype, experts):
    sizes = tiny.sizes(layout)
    config = DistributedConfig(**{f"{axis}_size": size for axis, size in sizes.items()})
    options = {"distributed_config": config} if sizes else {}
    if experts:
        options["experts_implementation"] = experts
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=dtype, attn_implementation="eager", **options
    )
    tp, dp = sizes.get("tp", 1), sizes.get("fsdp", 1) * sizes.get("dp_replicate", 1)
    return model, tp, dp


def facts_of(layout, dtype, loss, **more):
    dtype = str(dtype).removeprefix("torch.")
    program = {"program": "transformers", "version": transformers.__version__}
    return {**program, "layout": layout, "dtype": dtype, "loss": loss, **more}


def direct(model_folder, layout, dtype, experts, out):
    with tiny.computing_in(dtype):
        model, tp, dp = load(model_folder, layout, dtype, experts)
        rank = dist.get_rank() if dist.is_initialized() else 0
        rows = tiny.rows_of(rank // tp, dp)
        tokens, labels = tiny.batch()
        count = (labels != -100).sum()
        outputs = model(
            input_ids=tokens[rows],
            labels=labels[rows],
            shift_labels=labels[rows],
            num_items_in_batch=count,
            use_cache=False,
        )
        loss = tiny.whole(outputs.loss)
        (outputs.loss * dp).backward()
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= tp
        gradients = tiny.whole_gradients(model.named_parameters())
    tiny.hand_in(out, facts_of(layout, dtype, loss.item()), gradients)


class Capture(TrainerCallback):
    def __init__(self):
        self.gradients, self.logs = {}, {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.gradients = tiny.whole_gradients(model.named_parameters())

    def on_log(self, args, state, control, logs=None, **_):
        self.logs = {**logs, **self.logs}


class Rows(torch.utils.data.Dataset):
    """Rows with labels as the Trainer wants them: not shifted."""

    def __len__(self):
        return tiny.ROWS

    def __getitem__(self, row):
        tokens, labels = tiny.batch()
        back = torch.cat((tokens.new_full((1,), -100), labels[row, :-1]))
        return {"input_ids": tokens[row], "labels": back}


def in_trainer(model_folder, layout, dtype, experts, out):
    with tiny.computing_in(dtype):
        model, _, dp = load(model_folder, layout, dtype, experts)
        train(model, out, layout, dtype, dp, {})


def train(model, out, layout, dtype, dp, program):
    """Runs one step of the Trainer, which reads rows in order and clips nothing."""
    arguments = TrainingArguments(
        output_dir=str(out / "trainer"),
        per_device_train_batch_size=tiny.ROWS // dp,
        max_steps=1,
        max_grad_norm=1e9,
        learning_rate=ADAM["lr"],
        adam_beta2=ADAM["betas"][1],
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    capture = Capture()
    Trainer(model, arguments, train_dataset=Rows(), callbacks=[capture]).train()
    updated = {n: tiny.whole(p) for n, p in model.named_parameters() if p.requires_grad}
    norms = {"grad_norm": float(capture.logs["grad_norm"]), "max_norm": 1e9, "optimizer": ADAM}
    facts = {**facts_of(layout, dtype, float(capture.logs["loss"]), **norms), **program}
    tiny.hand_in(out, facts, capture.gradients, updated)


def main():
    out, models, cases = Path(sys.argv[1]), Path(sys.argv[2]), []
    for family in tiny.FAMILIES:
        for how, work, dtype, experts in (
            ("direct", direct, torch.float64, "eager"),
            ("trainer", in_trainer, torch.float32, None),
        ):
            for layout in LAYOUTS:
                # Accelerate refuses tensor parallelism where there is no GPU: one run says it.
                if how == "trainer" and "tp" in layout and layout != "tp=2":
                    continue
                kind = str(dtype).removeprefix("torch.")
                job = partial(work, models / family, layout, dtype, experts)
                cases.append((f"{family}.{how}.{kind}.{layout or 'plain'}", layout, job))
    for layout in ("fsdp=2", "fsdp=2,ep=2"):
        job = partial(direct, models / "qwen3_moe", layout, torch.float16, "eager")
        cases.append((f"qwen3_moe.direct.float16.{layout}", layout, job))
    list(tiny.run_cases(out, cases))


if __name__ == "__main__":
    main()
