"""megatron-core on CPU ranks: GPTModel, its DistributedDataParallel and its optimizer's norm.

python megatron_step.py OUT MODELS [REGEX]    MODELS: Hugging Face folders of tiny.py

Local (not Transformer Engine's) layers and SequentialMLP: what runs without CUDA. `substitute`
stands for streams, events, devices and random states of a GPU; no arithmetic is replaced.
"""

import re
import sys
from contextlib import nullcontext
from functools import partial
from importlib import metadata
from pathlib import Path

import tiny
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

LAYOUTS = (
    "dp=1",
    "dp=2",
    "dp=2,ep=2",
    "tp=2",
    "tp=2,ep=2",
    "dp=4,ep=2",
    "dp=4,ep=4",
    "dp=2,tp=2",
    "dp=2,tp=2,ep=2",
    "dp=2,tp=2,ep=4",
)
HEADS, GROUPS, HEAD_DIM, EXPERTS = 4, 2, 8, 8


class _OnCPU(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class _Stream:
    """A stream or an event: every method does nothing."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: _Stream()


def substitute():
    import megatron.core.tensor_parallel.random as random
    from megatron.core.transformer.moe import token_dispatcher

    _OnCPU().__enter__()
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor
    torch.cuda.Stream = torch.cuda.Event = _Stream
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.current_stream = lambda *args: _Stream()
    torch.cuda.stream = lambda stream: nullcontext()
    torch.cuda.synchronize = lambda *args: None
    random.CudaRNGStatesTracker.fork = lambda self, name=None: nullcontext()

    def as_numbers(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = as_numbers


def make_model(tp, ep):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=HEAD_DIM,
        ffn_hidden_size=48,
        moe_ffn_hidden_size=16,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=EXPERTS, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    model = GPTModel(
        config,
        spec,
        vocab_size=96,
        max_sequence_length=64,
        position_embedding_type="rope",
        rotary_base=10000,
        share_embeddings_and_output_weights=False,
    )
    return config, model


PLAIN = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}


def parts_of(name, first_expert):
    """Returns Hugging Face's names whose tensors this one joins, in dim 0."""
    if name in PLAIN:
        return [PLAIN[name]]
    _, _, layer, rest = name.split(".", 3)
    prefix = f"model.layers.{layer}"
    if rest in PLAIN:
        return [f"{prefix}.{PLAIN[rest]}"]
    if rest == "self_attention.linear_qkv.weight":
        return [f"{prefix}.self_attn.{part}_proj.weight" for part in "qkv"]
    number = int(re.search(r"local_experts\.(\d+)\.", rest)[1]) + first_expert
    words = ("gate", "up") if "linear_fc1" in rest else ("down",)
    return [f"{prefix}.mlp.experts.{number}.{word}_proj.weight" for word in words]


def joined(name, tensors):
    if len(tensors) != 3:
        return torch.cat(tensors)
    groups = [tensor.unflatten(0, (GROUPS, -1)) for tensor in tensors]
    return torch.cat(groups, 1).flatten(0, 1)


def split(names, whole):
    if len(names) != 3:
        return dict(zip(names, whole.chunk(len(names)), strict=True))
    sizes = [HEADS // GROUPS * HEAD_DIM, HEAD_DIM, HEAD_DIM]
    pieces = whole.unflatten(0, (GROUPS, -1)).split(sizes, 1)
    return {name: piece.flatten(0, 1) for name, piece in zip(names, pieces, strict=True)}


def is_cut(name, parameter):
    return "experts" not in name and getattr(parameter, "tensor_model_parallel", False)


def step(model_folder, layout, out):
    substitute()
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    sizes = {"dp": 1, "tp": 1, "ep": 1, **tiny.sizes(layout)}
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes["tp"],
        expert_model_parallel_size=sizes["ep"],
        expert_tensor_parallel_size=1,
    )
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    dp_rank = parallel_state.get_data_parallel_rank()
    first = parallel_state.get_expert_model_parallel_rank() * EXPERTS // sizes["ep"]
    config, model = make_model(sizes["tp"], sizes["ep"])
    weights = load_file(model_folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        whole = joined(name, [weights[each] for each in parts_of(name, first)])
        if is_cut(name, parameter):
            whole = whole.chunk(sizes["tp"], parameter.partition_dim)[tp_rank]
        parameter.data.copy_(whole)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=False)
    model = DistributedDataParallel(config, ddp, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.0, clip_grad=1e9), [model]
    )
    model.zero_grad_buffer()
    tokens, labels = tiny.batch()
    rows = tiny.rows_of(dp_rank, sizes["dp"])
    positions = torch.arange(tiny.LENGTH).expand(tokens[rows].shape)
    seen = labels[rows] != -100
    losses = model(tokens[rows], positions, None, labels=labels[rows].clamp(min=0))
    loss = (losses * seen).sum() / (labels != -100).sum()
    (loss * sizes["dp"]).backward()
    finalize_model_grads([model])
    gradients = {}
    for name, parameter in model.module.named_parameters():
        whole = parameter.main_grad.clone()
        if is_cut(name, parameter):
            pieces = [torch.empty_like(whole) for _ in range(sizes["tp"])]
            group = parallel_state.get_tensor_model_parallel_group()
            dist.all_gather(pieces, whole.contiguous(), group=group)
            whole = torch.cat(pieces, parameter.partition_dim)
        gradients |= split(parts_of(name, first), whole)
    # The step itself asserts CUDA tensors where it clips.
    optimizer.prepare_grads()
    norm = optimizer.get_grad_norm()
    total = loss.detach().clone()
    dist.all_reduce(total)
    facts = {"program": "megatron-core", "version": metadata.version("megatron-core")}
    facts |= {"layout": layout, "dtype": "float32", "loss": total.item() / sizes["tp"]}
    tiny.hand_in(out, {**facts, "grad_norm": float(norm), "max_norm": 1e9}, gradients)


def main():
    out, models = Path(sys.argv[1]), Path(sys.argv[2])
    job = partial(step, models / "qwen3_moe")
    list(
        tiny.run_cases(
            out, [(f"qwen3_moe.{layout}", layout, partial(job, layout)) for layout in LAYOUTS]
        )
    )


if __name__ == "__main__":
    main()
