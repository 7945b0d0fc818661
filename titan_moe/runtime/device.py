"""The device that a rank computes on, and its peak performance."""

from importlib.util import find_spec
from pathlib import Path

import torch
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl

from titan_moe.runtime import host_gloo
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.gpus import Device, gpu_of
from titan_moe.runtime.launch import Launch

_DRIVER = Path("/sys/module/nvidia/version")


def pick_device(launch: Launch, num_gpus: int = 0, *, share_gpus: bool = False) -> torch.device:
    """Returns this rank's GPU if CUDA is available, else the CPU.

    Args:
        num_gpus: GPUs found on this machine without CUDA (`launch.count_gpus`).
        share_gpus: whether ranks may share a GPU (`comm.share_gpus`).

    Raises:
        RunError: the machine has fewer GPUs than ranks, or GPUs that CUDA cannot use.
    """
    refuse_unusable(num_gpus)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    found = torch.cuda.device_count()
    if launch.local_world_size > found and not share_gpus:
        raise RunError(
            f"{launch.local_world_size} ranks for {found} GPUs: start with NGPU={found}, with "
            "--comm.share_gpus to test a layout, or with CUDA_VISIBLE_DEVICES= to use the CPU"
        )
    return torch.device("cuda", launch.local_rank % found)


def refuse_unusable(num_gpus: int) -> None:
    """Raises RunError if there are GPUs (`launch.count_gpus`), and this torch cannot use them."""
    if not num_gpus or torch.cuda.is_available():
        return
    driver = _DRIVER.read_text().strip() if _DRIVER.exists() else "of unknown version"
    if torch.version.cuda is None:
        why = f"torch {torch.__version__} has no CUDA: install torch's build for CUDA"
    else:
        why = (
            f"torch {torch.__version__} for CUDA {torch.version.cuda} cannot use them with the "
            f"NVIDIA driver {driver}: install a newer driver, or a torch for an older CUDA"
        )
    raise RunError(
        f"{num_gpus} GPUs found, but {why}; or start with CUDA_VISIBLE_DEVICES= to use the CPU "
        "(docs/troubleshooting.md#the-gpus-cannot-be-used)"
    )


def use_flash_attention_3(device: torch.device) -> None:
    """Lets torch run the kernels of FlashAttention-3 in place of its own flash attention.

    Does nothing unless the GPU is of capability 9.x and the package is installed. torch keeps its
    own kernels for whatever the package lacks, and asks the package for deterministic kernels where
    they are required.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return
    if find_spec("flash_attn_interface") is not None:
        activate_flash_attention_impl("FA3")


def backend_for(device: torch.device, num_ranks: int = 1, *, share_gpus: bool = False) -> str:
    """Returns torch.distributed's backends; with a GPU also gloo, for objects and checkpoints.

    Args:
        num_ranks: the ranks of this machine.
        share_gpus: whether collectives go through the host where GPUs are fewer than ranks, as on
            a machine without GPUs.
    """
    if share_gpus and num_ranks > torch.cuda.device_count():
        host_gloo.register()
        return host_gloo.BACKEND
    return "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"


def describe_device(device: torch.device) -> dict[str, str]:
    """Returns the device's name, and its capability, by which torch chooses kernels."""
    if device.type == "cuda":
        kernels = ".".join(map(str, torch.cuda.get_device_capability(device)))
        if (implementation := current_flash_attention_impl()) is not None:
            kernels += f" with {implementation}"
        return {"device": torch.cuda.get_device_name(device), "capability": kernels}
    return {"device": "cpu", "capability": torch.backends.cpu.get_cpu_capability()}


def memory_of(device: torch.device) -> int | None:
    """Returns the bytes of a GPU's memory that this rank may use; None for a CPU."""
    if device.type != "cuda":
        return None
    share = torch.cuda.get_per_process_memory_fraction(device)
    return int(torch.cuda.get_device_properties(device).total_memory * share)


def known_gpu(device: torch.device) -> Device | None:
    """Returns the figures of a GPU; None if they are not known, or for a CPU."""
    return gpu_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_flops(device: torch.device) -> float | None:
    """Returns the dense bf16 FLOP/s of a GPU; None if unknown, or for a CPU."""
    gpu = known_gpu(device)
    return None if gpu is None else gpu.flops
