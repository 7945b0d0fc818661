"""Measures a `runtime.gpus.Device` on this machine, by the program's own operations.

All devices work at once, as ranks do: GPUs, or one thread for each core of a CPU. A figure is the
median of several calls. On a CPU operations are timed by the processor time of their rank, which
other work on the machine hardly prolongs, and links by the wall clock. No step of a training is
measured, and nothing is fitted.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titan_moe.comm.collectives import gather_tokens, scatter_tokens
from titan_moe.models.attention import plain_core
from titan_moe.models.decoder import Decoder
from titan_moe.models.registry import model_config
from titan_moe.ops.grouped_mm import grouped_mm
from titan_moe.ops.varlen_attention import bounds_of
from titan_moe.planner.step_time import DISPATCHES
from titan_moe.runtime.gpus import GPUS, Device, gpu_of
from titan_moe.runtime.launch import count_gpus
from titan_moe.runtime.ranks import run_on_ranks

_SIZES = {"cpu": (1024, 512, 2**24), "cuda": (8192, 4096, 2**30)}
"""Tokens, channels, and bytes that are copied or sent, by the type of device."""
_EXPERTS, _HEAD_DIM = 8, 64
_TRIES = 30
"""Calls of each operation."""


def calibrate() -> Device:
    """Returns the device that each rank of this machine has. The data sheet's figures stand for
    what one machine cannot show: the links of a single GPU, and those between nodes."""
    gpus, cores = count_gpus(os.environ), len(os.sched_getaffinity(0))
    kind, ranks = ("cuda", gpus) if gpus else ("cpu", cores)
    name, memory = f"CPU of {cores} cores", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if gpus:
        gpu = torch.cuda.get_device_properties(0)
        name, memory = gpu.name, gpu.total_memory
    print(f"{name}: operations of {ranks} ranks", flush=True)
    figures = run_on_ranks(_rates, ranks, kind, device=kind)[0]
    device = replace(gpu_of(name) or GPUS["H100"], name=name, memory=memory, **figures)
    if gpus == 1:
        return device
    ranks = gpus or 2 * cores  # Most layouts have more ranks than a CPU has cores.
    print(f"links of {ranks} ranks", flush=True)
    none, many = run_on_ranks(_links, ranks, kind, device=kind)[0]
    crowd, rounds = (1, 1) if gpus else (2, ranks - 1)
    moved = crowd * _SIZES[kind][2] * (ranks - 1) / ranks
    link, latency = moved / many / device.reach, none / crowd / rounds
    device = replace(device, link=link, latency=latency)
    return device if gpus else replace(device, network=link, node=10**6, cores=cores)


def _rates(kind: str) -> dict[str, float]:
    """Returns what one device reaches."""
    tokens, dim, num_bytes = _SIZES[kind]
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    new = partial(torch.randn, device=kind, dtype=dtype)
    seconds, square = partial(_seconds, kind), new(2 * dim, 2 * dim)
    rows = torch.empty(4, num_bytes, device=kind, dtype=torch.uint8)
    flops = 2 * (2 * dim) ** 3 / seconds(lambda: square @ square)
    bandwidth = 2 * num_bytes / seconds(lambda: rows[0].copy_(rows[1]))
    fresh = 8 * num_bytes / seconds(rows.clone) / bandwidth

    x_TD, w_EDD = new(tokens, dim), new(_EXPERTS, dim, dim)
    ends_E = torch.arange(1, _EXPERTS + 1, device=kind, dtype=torch.int32) * (tokens // _EXPERTS)
    products = seconds(_both(F.linear, x_TD, w_EDD[0]))
    experts = seconds(_both(lambda x, w: grouped_mm(x, w, ends_E), x_TD, w_EDD))

    config, documents_BS = model_config("qwen3", "debugmodel"), torch.zeros(2, tokens // 2).int()
    core = plain_core(config, mask_documents=True, dtype=dtype, device_type=kind)
    mask = core.mask(documents_BS.to(kind), None, bounds_of(documents_BS))
    qkv = [new(2, dim // _HEAD_DIM, tokens // 2, _HEAD_DIM) for _ in range(3)]
    attends = seconds(_both(lambda q, k, v: core(q, k, v, mask, _HEAD_DIM**-0.5), *qkv))

    # `values_per_token` counts the norm and the sum, gate, up, silu(gate) and the product. The
    # concatenation counts as two more.
    def moves(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return torch.cat((x + F.rms_norm(x, (dim,)), F.silu(gate) * up), -1)

    elementwise = seconds(_both(moves, *(new(tokens, dim) for _ in range(3))))

    small = replace(config, dim=16, hidden_dim=16, vocab_size=16)
    model, few_BS = Decoder(small).to(kind, dtype), torch.zeros(1, 8, device=kind).long()
    host = seconds(lambda: model(few_BS, labels_BS=few_BS).backward())
    return {
        "flops": flops,
        "bandwidth": bandwidth,
        "fresh": fresh,
        "products": 6 * tokens * dim**2 / products / flops,
        "experts": 6 * tokens * dim**2 / experts / flops,
        "attention": 3.5 * 2 * tokens * dim * (tokens // 2 + 1) / attends / flops,
        "reach": 6 * 8 * tokens * dim * dtype.itemsize / elementwise / bandwidth,
        "dispatch": host / (3 * DISPATCHES["dense"] * config.num_layers),
    }


def _links(kind: str) -> tuple[float, float]:
    """Returns the seconds of one of the program's collectives with next to no bytes, and of torch's
    with many, by the wall clock."""
    group, seconds = dist.new_group(), partial(_seconds, "links")
    few = torch.zeros(1, 8, 16, device=kind)
    four = seconds(_both(lambda x: scatter_tokens(gather_tokens(x, group), group), few))
    whole, sent = torch.empty(2, _SIZES[kind][2], device=kind, dtype=torch.uint8).unbind()
    parts = list(whole.chunk(dist.get_world_size()))
    gather = seconds(lambda: dist.all_gather(parts, sent[: len(parts[0])]))
    return four / 4, (gather + seconds(lambda: dist.all_to_all_single(whole, sent))) / 2


def _both(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Any]:
    """Returns a call of a function and of its backward."""
    inputs = tuple(each.requires_grad_() for each in inputs)
    ones = torch.ones_like(function(*inputs))
    return lambda: torch.autograd.grad(function(*inputs), inputs, ones)


def _seconds(kind: str, run: Callable[[], object]) -> float:
    """Returns the median seconds of several calls."""
    clock, times = time.process_time if kind == "cpu" else time.perf_counter, []
    for _ in range(_TRIES):
        began = clock()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(clock() - began)
    return median(times[1:])
