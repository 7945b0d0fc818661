"""peft with stacked experts (target_parameters) on CPU ranks, under FSDP2 in three ways.

python peft_step.py OUT MODELS [REGEX]    compares with one plain process of peft
"""

import sys
from functools import partial
from pathlib import Path

import peft
import tiny
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers_step import train

WAYS = {
    "plain": ("",),
    "fully_shard": ("fsdp=2", "fsdp=4"),
    "accelerate": ("fsdp=2", "fsdp=4"),
    "trainer": ("fsdp=2", "fsdp=4", "fsdp=2,ep=2"),
    "native": ("tp=2", "tp=2,ep=2", "fsdp=4,ep=2", "fsdp=2,tp=2"),
}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted(model, dtype):
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], target_parameters=EXPERTS)
    model = get_peft_model(model, lora).to(dtype)
    generator = torch.Generator().manual_seed(3)
    for _, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            with torch.no_grad():
                tiny.assign(parameter, (0.1 * noise).to(dtype))
    return model


def load(model_folder, dtype, sizes=None):
    options = {"attn_implementation": "eager", "dtype": dtype}
    if dtype == torch.float64:
        options["experts_implementation"] = "eager"
    if sizes:
        sizes = {f"{axis}_size": size for axis, size in sizes.items()}
        options["distributed_config"] = DistributedConfig(**sizes)
    return AutoModelForCausalLM.from_pretrained(model_folder, **options)


def shard(model):
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def accelerated(model):
    """Applies Accelerate's FSDP2; its Accelerator chooses DDP wherever there is no accelerator."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3MoeDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = plugin
    return fsdp2_prepare_model(accelerator, model)


def step(model_folder, way, layout, dtype, out):
    sizes = tiny.sizes(layout)
    with tiny.computing_in(dtype):
        model = adapted(
            load(model_folder, dtype, sizes if way in ("native", "trainer") else None), dtype
        )
        if way == "fully_shard":
            model = shard(model)
        elif way == "accelerate":
            model = accelerated(model)
            assert isinstance(model, FSDPModule), type(model)
        elif way == "trainer":
            facts = {"program": "peft", "version": peft.__version__}
            return train(model, out, layout, dtype, sizes.get("fsdp", 1), facts)
        tp, dp = sizes.get("tp", 1), sizes.get("fsdp", 1)
        rank = dist.get_rank() if dist.is_initialized() else 0
        rows = tiny.rows_of(rank // tp, dp)
        tokens, labels = tiny.batch()
        logits = model(input_ids=tokens[rows], use_cache=False).logits
        flat = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[rows].flatten(), reduction="sum", ignore_index=-100
        )
        loss = flat / (labels != -100).sum()
        (loss * dp).backward()
        gradients = tiny.whole_gradients(model.named_parameters())
    total = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    facts = {"program": "peft", "version": peft.__version__, "layout": layout}
    facts |= {"dtype": str(dtype).removeprefix("torch."), "loss": total.item() / tp}
    tiny.hand_in(out, facts, gradients)


def main():
    out, models, cases = Path(sys.argv[1]), Path(sys.argv[2]), []
    for dtype in (torch.float64, torch.float32):
        kind = str(dtype).removeprefix("torch.")
        for way, layouts in WAYS.items():
            for layout in layouts:
                job = partial(step, models / "qwen3_moe", way, layout, dtype)
                cases.append((f"{kind}.{way}.{layout or 'process'}", layout, job))
    for folder in tiny.run_cases(out, cases):
        print(f"{folder.name:52} {tiny.compare(folder, out / 'float64.plain.process')}", flush=True)


if __name__ == "__main__":
    main()
