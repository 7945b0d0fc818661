"""DeepSpeed with AutoEP on CPU ranks: Hugging Face models whose experts it shards.

python deepspeed_step.py OUT MODELS [REGEX]    MODELS: Hugging Face folders of tiny.py
"""

import os
import sys
from functools import partial
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import tiny
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from transformers import AutoModelForCausalLM

LAYOUTS = ("dp=2", "dp=2,ep=1", "dp=2,ep=2", "dp=4,ep=2", "dp=4,ep=4")
STAGES = (0, 1, 2)
PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def published(name):
    """Returns Hugging Face's name, with {} for the number of an expert."""
    name = name.removeprefix("module.").replace(".mlp.router.gate.", ".mlp.gate.")
    prefix, _, last = name.rpartition(".")
    return f"{prefix}.{{}}.{PARTS[last]}.weight" if prefix.endswith("experts") else name


def gradients_of(engine, stage, first_expert):
    """Returns the gradients that this rank has, its experts' by their numbers in the whole."""
    gradients = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = safe_get_full_grad(parameter) if stage else parameter.grad
        name = published(name)
        if "{}" not in name:
            gradients[name] = gradient.clone()
            continue
        for number, matrix in enumerate(gradient.clone()):
            gradients[name.format(first_expert + number)] = matrix
    return gradients


def record_norms():
    """Returns a list that ZeRO 0's norm in float32 is added to: the engine keeps it nowhere."""
    import deepspeed.runtime.engine as engine

    norms, clip = [], engine.clip_grad_norm_

    def clip_and_record(*args, **kwargs):
        norms.append(clip(*args, **kwargs))
        return norms[-1]

    engine.clip_grad_norm_ = clip_and_record
    return norms


def step(model_folder, layout, stage, out):
    sizes = tiny.sizes(layout)
    rank, dp = dist.get_rank(), sizes["dp"]
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=torch.float32, attn_implementation="eager"
    )
    num_experts = model.config.num_local_experts
    config = {
        "train_micro_batch_size_per_gpu": tiny.ROWS // dp,
        "gradient_clipping": 1e9,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    if "ep" in sizes:
        expert_parallel = {"enabled": True, "autoep_size": sizes["ep"]}
        config["expert_parallel"] = {**expert_parallel, "use_grouped_mm": False}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    tokens, labels = tiny.batch()
    rows = tiny.rows_of(rank, dp)
    logits = engine(input_ids=tokens[rows], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels[rows].flatten(), reduction="sum", ignore_index=-100
    )
    loss = loss / (labels != -100).sum()
    engine.backward(loss * dp)
    ep = sizes.get("ep", 1)
    local = num_experts // ep
    gradients = (
        gradients_of(engine, stage, rank % ep * local)
        if "ep" in sizes
        else {
            n: (safe_get_full_grad(p) if stage else p.grad).clone()
            for n, p in engine.module.named_parameters()
        }
    )
    norms = record_norms()
    engine.step()
    norm = norms[0] if norms else engine.get_global_grad_norm()
    total = loss.detach().clone()
    dist.all_reduce(total)
    facts = {"program": "deepspeed", "version": deepspeed.__version__, "layout": layout}
    facts |= {"dtype": "float32", "loss": total.item(), "max_norm": 1e9}
    tiny.hand_in(out, {**facts, "grad_norm": None if norm is None else float(norm)}, gradients)


def main():
    out, models, cases = Path(sys.argv[1]), Path(sys.argv[2]), []
    for family in ("qwen3_moe", "mixtral"):
        for stage in STAGES:
            for layout in LAYOUTS:
                job = partial(step, models / family, layout, stage)
                cases.append((f"{family}.zero{stage}.{layout}", layout, job))
    list(tiny.run_cases(out, cases))


if __name__ == "__main__":
    main()
