"""Parity of exports: a model of ours, exported and loaded by transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from titan_moe.checkpoint.hf.transfer import save_hf
from titan_moe.models.decoder import Decoder
from titan_moe.models.hf import HFModel


def exported_logits(decoder: Decoder, model: HFModel, tokens_BS: Tensor) -> Tensor:
    """Logits [B, S, V] of what transformers loads from a float32 export."""
    tensors: dict[str, Tensor] = dict(decoder.named_parameters())
    tensors |= {name: b for name, b in decoder.named_buffers() if name.endswith("expert_bias")}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    with TemporaryDirectory() as folder:
        target = Path(folder, "exported")
        with _alone():
            save_hf(target, model, tensors, shapes, dtype=torch.float32, job_record={})
        theirs = AutoModelForCausalLM.from_pretrained(
            target,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        )
    with torch.no_grad():
        return theirs.eval()(tokens_BS, use_cache=False).logits


@contextmanager
def _alone() -> Iterator[None]:
    """A world of one process, which saving needs."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
