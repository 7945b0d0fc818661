"""torchtitan 0.2.2 on CPU ranks: its Trainer, with the substitutes of scripts/bench/torchtitan.

python torchtitan_step.py OUT MODELS [REGEX]    MODELS: Hugging Face folders of tiny.py
"""

import sys
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path

import tiny
import torch
from safetensors.torch import load_file

sys.path.append(str(Path(__file__).parents[2] / "scripts/bench/torchtitan"))
from torchtitan_rank import substitute

DEGREES = {
    "dp_replicate": "data_parallel_replicate_degree",
    "fsdp": "data_parallel_shard_degree",
    "tp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree",
    "etp": "expert_tensor_parallel_degree",
}
LAYOUTS = (
    "",
    "dp_replicate=2",
    "fsdp=2",
    "tp=2",
    "fsdp=2,ep=2",
    "dp_replicate=2,fsdp=2",
    "dp_replicate=2,fsdp=2,ep=2",
    "fsdp=4",
    "fsdp=4,ep=2",
    "fsdp=4,ep=4",
    "fsdp=2,tp=2",
    "fsdp=2,tp=2,ep=2",
    "fsdp=2,tp=2,ep=4",
    "fsdp=2,tp=2,ep=2,etp=2",
)
ADAM = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0}


def families():
    from torchtitan.models.deepseek_v3 import DeepSeekV3ModelArgs
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3 import Qwen3ModelArgs

    common = {"vocab_size": 96, "dim": 32, "n_layers": 2, "n_heads": 4, "norm_eps": 1e-6}
    common |= {"rope_theta": 10000, "moe_inter_dim": 16}
    moe = {"num_experts": 8, "top_k": 2, "route_norm": True, "use_grouped_mm": False}
    moe |= {"score_before_experts": False}
    qwen = MoEArgs(**moe, num_shared_experts=0, score_func="softmax", load_balance_coeff=None)
    groups = {"num_expert_groups": 4, "num_limited_groups": 2, "route_scale": 2.5}
    deepseek = MoEArgs(**moe, **groups, num_shared_experts=1, score_func="sigmoid")
    mla = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    heads = {"n_kv_heads": 2, "head_dim": 8, "qk_norm": True}
    return {
        "qwen3_moe": ("qwen3", Qwen3ModelArgs(**common, **heads, moe_enabled=True, moe_args=qwen)),
        "deepseek_v3": (
            "deepseek_v3",
            DeepSeekV3ModelArgs(**common, **mla, v_head_dim=8, inter_dim=48, moe_args=deepseek),
        ),
    }


class Rows:
    """The batch of one data-parallel rank, as a torchtitan data loader."""

    def __init__(self, dp_world_size, dp_rank, **_):
        self.rows = tiny.rows_of(dp_rank, dp_world_size)

    def __iter__(self):
        tokens, labels = tiny.batch()
        yield {"input": tokens[self.rows]}, labels[self.rows]

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def step(family, model_folder, layout, out):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.config import ConfigManager
    from torchtitan.protocols import train_spec as specs
    from torchtitan.train import Trainer

    seen = {}

    class Metrics(MetricsProcessor):
        def log(self, step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=None):
            seen.update(loss=float(global_avg_loss), grad_norm=float(grad_norm))

    name, arguments = families()[family]
    spec = specs.get_train_spec(name)
    spec = replace(
        spec,
        model_args={"tiny": arguments},
        build_dataloader_fn=Rows,
        build_tokenizer_fn=None,
        build_metrics_processor_fn=lambda config, dims, model_args=None: Metrics(config, dims),
    )
    specs.register_train_spec("tiny", spec)
    sizes = tiny.sizes(layout)
    dp = sizes.get("fsdp", 1) * sizes.get("dp_replicate", 1)
    flags = {
        "job.dump_folder": out / "run",
        "model.name": "tiny",
        "model.flavor": "tiny",
        "model.hf_assets_path": model_folder,
        "training.steps": 1,
        "training.seq_len": tiny.LENGTH,
        "training.local_batch_size": tiny.ROWS // dp,
        "training.max_norm": 1e9,
        "training.mixed_precision_param": "float32",
        "optimizer.lr": ADAM["lr"],
        "optimizer.weight_decay": 0,
        "optimizer.implementation": "for-loop",
        "lr_scheduler.warmup_steps": 0,
        "activation_checkpoint.mode": "none",
        "parallelism.data_parallel_shard_degree": 1,
        **{f"parallelism.{DEGREES[axis]}": degree for axis, degree in sizes.items()},
    }
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    trainer = Trainer(ConfigManager().parse_args(words))
    (model,) = trainer.model_parts
    adapter = spec.state_dict_adapter(arguments, None)

    def published(values):
        return adapter.to_hf({n: v for n, v in values.items() if v is not None})

    def capture(optimizer, args, kwargs):
        plain = ((n.replace("module.", ""), p) for n, p in model.named_parameters())
        seen["gradients"] = published(tiny.whole_gradients(plain))

    trainer.optimizers.optimizers[0].register_step_pre_hook(capture)
    # The checkpointer's own way from Hugging Face fails with dp_replicate.
    weights = adapter.from_hf(load_file(model_folder / "model.safetensors"))
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, weights, options=options)
    begin = published({n: tiny.whole(p) for n, p in model.named_parameters()})
    different_weights(begin, model_folder)
    trainer.step = 1
    trainer.train_step(trainer.batch_generator(trainer.dataloader))
    facts = {"program": "torchtitan", "version": metadata.version("torchtitan"), "layout": layout}
    norms = {"loss": seen["loss"], "grad_norm": seen["grad_norm"], "max_norm": 1e9}
    tiny.hand_in(out, {**facts, **norms, "dtype": "float32", "optimizer": ADAM}, seen["gradients"])


def attend_on_local_heads():
    """DTensor has no rule for the CPU's attention kernel; each rank has heads of its own."""
    from torch.distributed.tensor import DTensor

    whole = torch.nn.functional.scaled_dot_product_attention

    def attend(query, *rest, **options):
        if not isinstance(query, DTensor):
            return whole(query, *rest, **options)
        local = whole(query.to_local(), *(tensor.to_local() for tensor in rest), **options)
        return DTensor.from_local(local, query.device_mesh, query.placements, run_check=False)

    torch.nn.functional.scaled_dot_product_attention = attend


def different_weights(weights, model_folder):
    """Raises ValueError unless the model has the folder's weights: the run says nothing then."""
    right = load_file(model_folder / "model.safetensors")
    names = [n for n, value in weights.items() if not torch.equal(value.float(), right[n].float())]
    if names:
        raise ValueError(f"weights differ from the folder's: {names}")


def main():
    out, models, cases = Path(sys.argv[1]), Path(sys.argv[2]), []
    substitute()
    attend_on_local_heads()
    import torchtitan.train

    del torchtitan.train
    for family in families():
        for layout in LAYOUTS:
            job = partial(step, family, models / family, layout)
            cases.append((f"{family}.{layout or 'plain'}", layout, job))
    list(tiny.run_cases(out, cases, start=False))


if __name__ == "__main__":
    main()
