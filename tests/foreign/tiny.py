"""Small models, one batch, ranks by fork, and the folder that a foreign run hands in.

Imports torch and safetensors, and transformers to write a model, but nothing of titan_moe: it runs
in each stack's environment. `python tiny.py FOLDER` writes the models.
"""

import json
import os
import re
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

ROWS, LENGTH = 4, 16
_COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "mixtral": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
    },
    "gpt_oss": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 10,
    },
}


# --- what every stack gets ------------------------------------------------------------------------


def write_model(family: str, folder: Path, **settings: Any) -> None:
    """Writes a Hugging Face folder; its random weights are large enough that routers choose."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**_COMMON, **FAMILIES[family], **settings})
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.1 * noise if name.endswith("norm.weight") else 0.2 * noise
    model.save_pretrained(folder)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and shifted labels, both [ROWS, LENGTH]. Rows have unequally many targets."""
    generator = torch.Generator().manual_seed(11)
    words = torch.randint(3, 96, (ROWS, LENGTH), generator=generator)
    labels = torch.cat((words[:, 1:], words.new_full((ROWS, 1), -100)), 1)
    for row in range(ROWS):
        labels[row, : 3 * row] = -100
    return words, labels


def rows_of(dp_rank: int, dp_size: int) -> slice:
    count = ROWS // dp_size
    return slice(dp_rank * count, (dp_rank + 1) * count)


class Lifted(TorchFunctionMode):
    """Turns requests for float32 into float64: models cast norms and scores whatever their type."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextmanager
def computing_in(dtype: torch.dtype) -> Any:
    torch.set_default_dtype(dtype)
    if dtype == torch.float64:
        with Lifted():
            yield
    else:
        yield
    torch.set_default_dtype(torch.float32)


# --- ranks ----------------------------------------------------------------------------------------


def sizes(layout: str) -> dict[str, int]:
    pairs = (axis.partition("=") for axis in layout.split(",") if axis)
    return {name: int(size) for name, _, size in pairs}


def num_ranks(layout: str) -> int:
    return prod(size for axis, size in sizes(layout).items() if axis not in ("ep", "etp"))


def run_ranks(world: int, work: Callable[[], None], log: Path, start: bool = True) -> bool:
    """Forks `world` ranks, each with torchrun's variables; returns whether all ended well.

    start: start gloo, which some stacks do themselves. Output goes to log.RANK. A fork costs 0.1 s
    where a start with all imports costs 10.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sys.stdout.flush()
    children = {_fork(rank, world, port, work, log, start) for rank in range(world)}
    well = True
    while children:
        child, status = os.wait()
        children.discard(child)
        if status and well:
            well = False
            time.sleep(1)  # Others may have the same to say.
            for other in children:
                os.kill(other, signal.SIGKILL)
    return well


def _fork(
    rank: int, world: int, port: int, work: Callable[[], None], log: Path, start: bool
) -> int:
    if child := os.fork():
        return child
    code = 1
    signal.alarm(120)
    try:
        with open(f"{log}.{rank}", "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        names |= {"MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1", "GROUP_RANK": 0}
        os.environ |= {name: str(value) for name, value in names.items()}
        if start and world > 1:
            dist.init_process_group("gloo")
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_cases(
    out: Path, cases: Iterable[tuple[str, str, Callable[..., None]]], start: bool = True
) -> Iterable[Path]:
    """Runs each (name, layout, job) whose name matches the last argument of the command, if any.

    job: is called with the run's folder. Prints what stops a run; yields the folders of the others.
    """
    pattern = re.compile(sys.argv[3] if len(sys.argv) > 3 else "")
    for name, layout, job in cases:
        if not pattern.search(name):
            continue
        folder = fresh(out / name)
        if run_ranks(num_ranks(layout), partial(job, folder), folder / "log", start):
            yield folder
        else:
            print(f"{name:52} stops: {last_line(folder / 'log')}", flush=True)


def last_line(log: Path) -> str:
    """Returns the exception of the first rank that says one."""
    for file in sorted(log.parent.glob(f"{log.name}.*")):
        lines = [line for line in file.read_text().splitlines() if line[:1].isalpha()]
        if lines and ("Error" in lines[-1] or "Exception" in lines[-1]):
            return lines[-1]
    return "no message"


def place_of_error(log: Path) -> tuple[str, str]:
    """Returns the last place in a rank's traceback, from the package on, and its line."""
    lines = log.read_text().splitlines()
    at = max(number for number, line in enumerate(lines) if line.startswith('  File "'))
    return lines[at].rpartition("site-packages/")[2], lines[at + 1].strip()


# --- handing in -----------------------------------------------------------------------------------


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a DTensor's whole value as this rank sees it; collective."""
    from torch.distributed.tensor import DTensor

    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def assign(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Copies a whole value into a parameter that may be sharded."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    parameter.copy_(value)


def whole_gradients(parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """Returns each parameter's whole gradient, None where it has none; collective."""
    return {n: None if p.grad is None else whole(p.grad) for n, p in parameters if p.requires_grad}


def hand_in(
    folder: Path,
    facts: dict[str, Any],
    gradients: dict[str, Any],
    updated: dict[str, torch.Tensor] | None = None,
) -> None:
    """Writes this rank's files; rank 0 those of the run. Every rank's copies are handed in."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    folder.mkdir(parents=True, exist_ok=True)
    none = [name for name, gradient in gradients.items() if gradient is None]
    some = {n: g.contiguous() for n, g in gradients.items() if g is not None}
    save_file(some, folder / f"gradients-{rank}.safetensors")
    if updated:
        copies = {name: value.contiguous() for name, value in updated.items()}
        save_file(copies, folder / f"updated-{rank}.safetensors")
    if rank == 0:
        tokens, labels = batch()
        save_file({"tokens": tokens, "labels": labels}, folder / "batch.safetensors")
        whole_run = {
            "num_targets": int((labels != -100).sum()),
            "grad_norm": None,
            "max_norm": None,
        }
        whole_run |= {"optimizer": None, **({"no_gradient": none} if none else {}), **facts}
        (folder / "foreign.json").write_text(json.dumps(whole_run, indent=1))


def compare(folder: Path, plain: Path) -> str:
    """Returns the worst gradient, the norm and the loss beside the plain process's.

    For adapters; titan-moe verify foreign does it for models.
    """
    right, worst = load_file(plain / "gradients-0.safetensors"), (0.0, "", 1.0)
    for file in sorted(folder.glob("gradients-*.safetensors")):
        for name, gradient in load_file(file).items():
            want = right[name].double()
            error = ((gradient - want).norm() / want.norm()).item()
            worst = max(
                worst, (error, name, ((gradient * want).sum() / (want * want).sum()).item())
            )
    facts, whole = (json.loads((each / "foreign.json").read_text()) for each in (folder, plain))
    norm = sum(value.double().square().sum() for value in right.values()) ** 0.5
    reported = "none" if facts["grad_norm"] is None else f"{facts['grad_norm'] / norm:.8f}"
    loss = facts["loss"] / whole["loss"]
    return f"worst {worst[0]:.1e} ratio {worst[2]:.6f} {worst[1]}; norm {reported}, loss {loss:.8f}"


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    for each in FAMILIES:
        write_model(each, Path(sys.argv[1], each))
