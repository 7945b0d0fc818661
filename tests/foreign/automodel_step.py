"""NeMo Automodel on CPU ranks: its Qwen3-MoE, meshes, parallelizer and gradient scaling.

python automodel_step.py OUT MODELS [REGEX]    MODELS: Hugging Face folders of tiny.py

The recipe's step in the order of its calls (recipes/llm/train_ft.py); the recipe itself wants CUDA.
"""

import sys
from functools import partial
from importlib import metadata
from pathlib import Path

import tiny
import torch
import torch.distributed as dist
from safetensors.torch import load_file

LAYOUTS = (
    "",
    "fsdp=2",
    "fsdp=2,ep=2",
    "fsdp=4",
    "fsdp=4,ep=2",
    "fsdp=4,ep=4",
    "dp_replicate=2,fsdp=2",
    "dp_replicate=2,fsdp=2,ep=2",
    "dp_replicate=2,fsdp=2,ep=4",
)


def make_model(model_folder):
    from nemo_automodel.components.models.common.utils import BackendConfig
    from nemo_automodel.components.models.qwen3_moe.model import Qwen3MoeForCausalLM
    from transformers import AutoConfig

    # The constructor names a CUDA device; nothing is put there.
    torch.cuda.current_device = lambda: 0
    config = AutoConfig.from_pretrained(model_folder, dtype="float32")
    config.torch_dtype = "float32"
    config.router_aux_loss_coef = 0.0  # It is added whatever output_router_logits says.
    backend = BackendConfig(
        attn="sdpa",
        linear="torch",
        rms_norm="torch",
        experts="torch",
        dispatcher="torch",
        rope_fusion=False,
        enable_hf_state_dict_adapter=True,
    )
    model = Qwen3MoeForCausalLM.from_config(config, backend=backend)
    model.model.rotary_emb.device = torch.device("cpu")
    weights = load_file(model_folder / "model.safetensors")
    model.load_state_dict(model.state_dict_adapter.from_hf(weights))
    return model.float().train()


def parallelized(model, sizes):
    from nemo_automodel.components.distributed.mesh import ParallelismSizes
    from nemo_automodel.components.distributed.mesh_utils import _create_fsdp2_device_mesh
    from nemo_automodel.components.moe.parallelizer import parallelize_model
    from torch.distributed.fsdp import MixedPrecisionPolicy

    replicas = sizes.get("dp_replicate", 1)
    degrees = ParallelismSizes(dp_replicate_size=replicas, ep_size=sizes.get("ep", 1))
    mesh, moe_mesh = _create_fsdp2_device_mesh(degrees, world_size=dist.get_world_size())
    parallelize_model(
        model,
        mesh,
        moe_mesh,
        dp_axis_names=("dp_replicate", "dp_shard_cp") if replicas > 1 else ("dp_shard_cp",),
        cp_axis_name="cp",
        tp_axis_name="tp",
        ep_axis_name="ep",
        ep_shard_axis_names=("ep_shard",) if moe_mesh is not None else None,
        mp_policy=MixedPrecisionPolicy(),
    )
    return mesh, moe_mesh


def step(model_folder, layout, out):
    from nemo_automodel.components.training.utils import scale_grads_and_clip_grad_norm

    sizes = tiny.sizes(layout)
    model, mesh, moe_mesh = make_model(model_folder), None, None
    if sizes:
        mesh, moe_mesh = parallelized(model, sizes)
    dp = sizes.get("fsdp", 1) * sizes.get("dp_replicate", 1)
    tokens, labels = tiny.batch()
    rows = tiny.rows_of(dist.get_rank() if sizes else 0, dp)
    logits = model(tokens[rows]).logits
    loss = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels[rows].flatten(), reduction="sum", ignore_index=-100
    )
    loss = loss / (labels != -100).sum()
    (loss * dp).backward()
    norm = scale_grads_and_clip_grad_norm(
        1e9,
        [model],
        device_mesh=mesh,
        moe_mesh=moe_mesh,
        ep_axis_name="ep" if moe_mesh is not None else None,
        num_label_tokens=int((labels != -100).sum()),
        dp_group_size=dp,
    )
    gradients = tiny.whole_gradients(model.named_parameters())
    gradients = model.state_dict_adapter.to_hf(gradients)
    total = loss.detach().clone()
    if sizes:
        dist.all_reduce(total)
    program = {"program": "nemo-automodel", "version": metadata.version("nemo-automodel")}
    facts = {"layout": layout, "dtype": "float32", "loss": total.item(), "max_norm": 1e9}
    tiny.hand_in(out, {**program, **facts, "grad_norm": float(norm)}, gradients)


def main():
    out, models = Path(sys.argv[1]), Path(sys.argv[2])
    job = partial(step, models / "qwen3_moe")
    list(
        tiny.run_cases(
            out,
            [
                (f"qwen3_moe.{layout or 'plain'}", layout, partial(job, layout))
                for layout in LAYOUTS
            ],
        )
    )


if __name__ == "__main__":
    main()
