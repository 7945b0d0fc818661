"""torchtitan 0.3.0 on CPU ranks: its own Trainer, through substitutes of scripts/bench/torchtitan.

python torchtitan3_step.py OUT MODELS [REGEX]    MODELS: Hugging Face folders of tiny.py
"""

import sys
from functools import partial
from importlib import metadata
from pathlib import Path

import tiny
import torch
from safetensors.torch import load_file
from torchtitan_step import DEGREES, Rows, attend_on_local_heads, different_weights

sys.path.append(str(Path(__file__).parents[2] / "scripts/bench/torchtitan"))
import torchtitan_rank

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
)
BACKENDS = ("partial_dtensor", "full_dtensor", "spmd_types")


def model_spec():
    from dataclasses import replace

    from torchtitan.models import qwen3
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear
    from torchtitan.models.common.attention import ScaledDotProductAttention

    layers = qwen3._build_qwen3_moe_layers(
        n_layers=2,
        dim=32,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        moe_hidden_dim=16,
        num_experts=8,
        top_k=2,
        fuse_qkv=False,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=8, max_seq_len=64, theta=10000.0),
    )
    config = qwen3.Qwen3Model.Config(
        vocab_size=96,
        dim=32,
        norm=qwen3._qwen3_norm(32),
        enable_weight_tying=False,
        tok_embeddings=Embedding.Config(
            num_embeddings=96, embedding_dim=32, param_init=qwen3._EMBEDDING_INIT
        ),
        lm_head=Linear.Config(in_features=32, out_features=96, param_init=qwen3._LINEAR_INIT),
        layers=layers,
    )
    for layer in layers:
        # The registry offers GPUs' kernels alone; this one is for its own tests.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    spec = qwen3.model_registry("debugmodel_moe")
    return replace(spec, model=config)


class Made:
    """Stands for a component's configuration: `build` gives the component."""

    def __init__(self, build):
        self.build = build

    def to_dict(self):
        return {}


def step(model_folder, layout, backend, out):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.trainer import Trainer

    sizes = tiny.sizes(layout)
    degrees = {DEGREES[axis]: degree for axis, degree in sizes.items()}
    dp = sizes.get("fsdp", 1) * sizes.get("dp_replicate", 1)
    spec = model_spec()
    config = Trainer.Config(
        model_spec=spec,
        dump_folder=str(out / "run"),
        loss=CrossEntropyLoss.Config(global_vocab_size=96),
        tokenizer=Made(lambda **_: None),
        dataloader=Made(Rows),
        optimizer=default_adamw(lr=1e-3, implementation="for-loop"),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=None,
        parallelism=ParallelismConfig(
            **{"data_parallel_shard_degree": 1, **degrees}, spmd_backend=backend
        ),
        training=TrainingConfig(
            local_batch_size=tiny.ROWS // dp,
            seq_len=tiny.LENGTH,
            steps=1,
            max_norm=1e9,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
    )
    trainer = config.build()
    seen = {}

    def log(step, global_avg_loss, global_max_loss, grad_norm, *_, **__):
        seen.update(loss=float(global_avg_loss), grad_norm=float(grad_norm))

    trainer.metrics_processor.log = log
    (model,) = trainer.model_parts
    adapter = spec.state_dict_adapter(spec.model, None)

    def published(values):
        return adapter.to_hf({n: v for n, v in values.items() if v is not None})

    def capture(optimizer, args, kwargs):
        seen["gradients"] = published(tiny.whole_gradients(model.named_parameters()))

    trainer.optimizers.optimizers[0].register_step_pre_hook(capture)
    weights = adapter.from_hf(load_file(model_folder / "model.safetensors"))
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, weights, options=options)
    begin = published({n: tiny.whole(p) for n, p in model.named_parameters()})
    different_weights(begin, model_folder)
    trainer.step = 1
    trainer.train_step(trainer.batch_generator(trainer.dataloader))
    facts = {"program": "torchtitan", "version": metadata.version("torchtitan"), "layout": layout}
    norms = {"loss": seen["loss"], "grad_norm": seen["grad_norm"], "max_norm": 1e9}
    tiny.hand_in(out, {**facts, **norms, "dtype": "float32"}, seen["gradients"])


def main():
    out, models, cases = Path(sys.argv[1]), Path(sys.argv[2]), []
    for substitute in (
        torchtitan_rank._name_the_device,
        torchtitan_rank._count_integers,
        torchtitan_rank._drop_device_ids,
        torchtitan_rank._sum_in_fsdp,
        torchtitan_rank._profile_the_cpu_alone,
        attend_on_local_heads,
    ):
        substitute()
    # Experts compute in bfloat16 whatever is configured: its rounding, 3 %, would hide mistakes.
    torch.Tensor.bfloat16 = lambda tensor: tensor
    import torchtitan.trainer

    del torchtitan.trainer
    for backend in BACKENDS:
        for layout in LAYOUTS:
            job = partial(step, models / "qwen3_moe", layout, backend)
            cases.append((f"qwen3_moe.{backend}.{layout or 'plain'}", layout, job))
    list(tiny.run_cases(out, cases, start=False))


if __name__ == "__main__":
    main()
