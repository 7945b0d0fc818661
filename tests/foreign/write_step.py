"""Writes a step of a PyTorch program, with or without FSDP2, for `titan-moe verify foreign`."""

import json
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor


def write_tensors(folder, kind, tensors, first_rows=None):
    """Call on all ranks: "gradients" after the backward, before clipping; "updated" after the step.

    A DTensor is written whole, by rank 0. Others are written by each rank as it holds them; where
    that is a part of the experts, first_rows has the number of the first one, by name.
    """
    rank, held = dist.get_rank() if dist.is_initialized() else 0, {}
    for name, tensor in tensors.items():
        is_shared = isinstance(tensor, DTensor)
        whole = tensor.full_tensor() if is_shared else tensor
        if rank == 0 or not is_shared:
            held[plain(name)] = whole.detach().cpu().contiguous().clone()
    rows = {plain(name): row for name, row in (first_rows or {}).items() if plain(name) in held}
    Path(folder).mkdir(parents=True, exist_ok=True)
    if held:
        save_file(held, f"{folder}/{kind}-{rank}.safetensors", {"rows": json.dumps(rows)})


def plain(name):
    """Returns a parameter's name without those of compile, checkpointing and DDP."""
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def gradients_of(model):
    """Returns gradients by name, and the names of parameters that have none."""
    found = {plain(name): p.grad for name, p in model.named_parameters()}
    none = [name for name, gradient in found.items() if gradient is None]
    return {name: g for name, g in found.items() if g is not None}, none


def write_facts(folder, tokens, labels, **facts):
    """Call on rank 0: writes all ranks' rows, and the step's numbers (keys: docs/court.md)."""
    save_file({"tokens": tokens, "labels": labels}, f"{folder}/batch.safetensors")
    facts["num_targets"] = int((labels != -100).sum())
    Path(folder, "foreign.json").write_text(json.dumps(facts))
