"""Names for what a step does, in a profile: installed around a built model, which knows nothing.

A region is a record_function around a function of the forward pass, or of the step. What the
backward does for it is found by who made its operations (autograd's sequence numbers), and what
recomputation does by its running inside the backward; see verify/profile_trace.py.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from titan_moe.distributed.parallelize import ShardedModel
from titan_moe.moe.layer import MoE

PREFIX = "region::"
"""Of a region's name in a trace."""
REGIONS = (
    "data",
    "embedding",
    "attention",
    "route",
    "dispatch",
    "experts",
    "combine",
    "shared_experts",
    "feed_forward",
    "loss",
    "grad_norm",
    "optimizer",
)
"""In the order of a step."""
_OF_MOE = {
    "route": ("router.forward", "routing_fn", "router.gating_weights"),
    "dispatch": ("dispatcher.plan", "dispatcher.send", "dispatcher.receive"),
    "experts": ("experts.forward",),
    "combine": ("dispatcher.combine",),
    "shared_experts": ("shared_experts.forward",),
}
_OF_MODULES = {
    "embedding": ("tok_embeddings",),
    "attention": ("layers.*.attention", "mtp.layers.*.block.attention"),
    "feed_forward": ("layers.*.feed_forward", "mtp.layers.*.block.feed_forward"),
    "loss": ("output",),
}


def name_regions(sharded: ShardedModel, *, train_step: Any, loader: Any) -> None:
    """Wrap the functions of each region, once, for the rest of a run.

    What a model does not have (a layer without shared experts, a stage without an embedding) is
    left out. Outside of a recorded step a region costs less than a microsecond.
    """
    for part in sharded.parts:
        for moe in part.moe_layers().values():
            _name_moe(moe)
        for region, patterns in _OF_MODULES.items():
            for module in _matching(part, patterns):
                _wrap(module, "forward", region)
    _wrap(loader, "next_step", "data")
    _wrap(train_step, "_reduce", "grad_norm")
    _wrap(train_step, "_update", "optimizer")


def _name_moe(moe: MoE) -> None:
    for region, paths in _OF_MOE.items():
        for path in paths:
            holder, _, name = path.rpartition(".")
            owner = getattr(moe, holder) if holder else moe
            if owner is not None and hasattr(owner, name):
                _wrap(owner, name, region)


def _matching(part: nn.Module, patterns: tuple[str, ...]) -> Iterator[nn.Module]:
    wanted = [pattern.split(".") for pattern in patterns]
    for name, module in part.named_modules():
        parts = name.split(".")
        for pattern in wanted:
            fits = len(parts) == len(pattern) and not isinstance(module, nn.Identity)
            if fits and all(p in ("*", own) for p, own in zip(pattern, parts, strict=True)):
                yield module


def _wrap(owner: Any, name: str, region: str) -> None:
    setattr(owner, name, _named(getattr(owner, name), PREFIX + region))


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        # A compiled layer is one region of its own: names in it would break its graph.
        if torch.compiler.is_compiling() or not torch.autograd._profiler_enabled():
            return function(*args, **kwargs)
        with record_function(name):
            return function(*args, **kwargs)

    return run
