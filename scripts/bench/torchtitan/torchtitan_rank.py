"""The rank's half of compare.py: torchtitan 0.2.2 where there is no GPU.

    torchrun ... scripts/bench/torchtitan/torchtitan_rank.py --job.config_file ...

Runs in torchtitan's environment, so it imports nothing of titan_moe. torchtitan asks for CUDA,
Triton and NCCL in a few places; `substitute` puts the CPU's answers there before it is imported.
Nothing of its code is changed on disk, and its model, loop and optimizer are its own.
"""

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist


def main() -> None:
    substitute()
    from torchtitan.train import Trainer
    from torchtitan.train import main as train

    add_models()
    train(Trainer)


def substitute() -> None:
    """Puts in place everything that torchtitan 0.2.2 needs to run on CPUs with gloo."""
    _name_the_device()
    _count_integers()
    _drop_device_ids()
    _sum_in_fsdp()
    _permute_without_triton()
    _profile_the_cpu_alone()


def _name_the_device() -> None:
    """torchtitan takes the accelerator's type and module, else "cuda"; it then asks for memory."""
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
    answers: dict[str, Callable[..., Any]] = {
        "get_device_name": lambda device=None: "CPU",
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=1 << 40),
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
    }
    for name, answer in answers.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, answer)


def _count_integers() -> None:
    """torch.histc has no integer version on CPUs. The router's bins are the integers below
    `bins`, so counting them is the same."""
    histc = torch.histc

    @wraps(histc)
    def counted(values: torch.Tensor, *, bins: int, min: float, max: float) -> torch.Tensor:
        if values.is_floating_point():
            return histc(values, bins=bins, min=min, max=max)
        return torch.bincount(values, minlength=bins)

    torch.histc = counted  # type: ignore[assignment]


def _drop_device_ids() -> None:
    """gloo's barrier refuses `device_ids`."""
    barrier = dist.barrier

    @wraps(barrier)
    def without_devices(*args: Any, **kwargs: Any) -> Any:
        return barrier(*args, **{k: v for k, v in kwargs.items() if k != "device_ids"})

    dist.barrier = without_devices  # type: ignore[assignment]


def _sum_in_fsdp() -> None:
    """FSDP2 asks for NCCL's scaled sum if there is a divide factor; gloo has plain sums only."""
    from torch.distributed.fsdp import FSDPModule

    set_factor = FSDPModule.set_gradient_divide_factor

    @wraps(set_factor)
    def set_factor_and_sum(module: Any, factor: float) -> None:
        set_factor(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_factor_and_sum  # type: ignore[assignment]


def _profile_the_cpu_alone() -> None:
    """torchtitan asks torch's profiler for an accelerator's activities besides, which is None."""
    profile = torch.profiler.profile

    @wraps(profile)
    def of_the_cpu(*, activities: Sequence[Any], **kwargs: Any) -> Any:
        return profile(activities=[each for each in activities if each is not None], **kwargs)

    torch.profiler.profile = of_the_cpu  # type: ignore[assignment,misc]


def _permute_without_triton() -> None:
    """Load torchtitan's file of Triton kernels without Triton, and give it a torch one instead.

    Only that file sees the stub of Triton: torch itself looks for a real one in many places.
    """
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    triton.jit = lambda function: function  # type: ignore[attr-defined]
    triton.language = language  # type: ignore[attr-defined]
    language.constexpr = object  # type: ignore[attr-defined]
    package = find_spec("torchtitan")
    assert package is not None and package.submodule_search_locations
    name = "torchtitan.models.moe.kernels"
    file = Path(package.submodule_search_locations[0], "models/moe/kernels.py")
    spec = spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    kernels = module_from_spec(spec)
    sys.modules |= {"triton": triton, "triton.language": language}
    spec.loader.exec_module(kernels)
    del sys.modules["triton"], sys.modules["triton.language"]
    kernels.fill_indices_wrapper = fill_indices  # type: ignore[attr-defined]
    sys.modules[name] = kernels


def fill_indices(
    tokens_per_expert_group: torch.Tensor,
    start_index_values: torch.Tensor,
    write_offsets: torch.Tensor,
    experts_per_rank: int,
    num_ranks: int,
    max_len: int,
    **_: int,
) -> torch.Tensor:
    """Returns the received row at each place of the order by local expert: int32 [max_len].

    Received rows are in the order of sending ranks, and of experts within each:
    `tokens_per_expert_group` and `start_index_values` are [num_ranks * experts_per_rank]. Local
    expert e's rows are written from `write_offsets[e]` on, by sending rank; -1 where no row stands.
    """
    order = (num_ranks, experts_per_rank)
    lengths = tokens_per_expert_group.view(order).T  # [experts_per_rank, num_ranks]
    starts = start_index_values.view(order).T
    places = write_offsets[:, None] + lengths.cumsum(1) - lengths
    indices = torch.full((max_len,), -1, dtype=torch.int32)
    for length, start, place in zip(
        *(numbers.flatten().long().tolist() for numbers in (lengths, starts, places)), strict=True
    ):
        indices[place : place + length] = torch.arange(start, start + length, dtype=torch.int32)
    return indices


def add_models() -> None:
    """torchtitan's qwen3 has no flavor of the size that is compared."""
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3 import Qwen3ModelArgs, qwen3_args

    qwen3_args["peer"] = Qwen3ModelArgs(
        vocab_size=2048,
        dim=256,
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        head_dim=32,
        qk_norm=True,
        norm_eps=1e-6,
        rope_theta=10_000,
        moe_enabled=True,
        moe_inter_dim=512,
        moe_args=MoEArgs(
            num_experts=8,
            num_shared_experts=0,
            top_k=2,
            score_func="softmax",
            route_norm=True,
            score_before_experts=False,
            load_balance_coeff=None,
            # The other path computes in bf16 whatever is configured. torchtitan itself takes this
            # one for deepseek_v3 where there is no SM90.
            use_grouped_mm=False,
        ),
    )


if __name__ == "__main__":
    main()
