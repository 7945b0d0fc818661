"""torch.compile, block by block.

A block is traced on its own, so that a model of many equal layers is compiled once. Of a mixture of
experts the pieces that compute are compiled each by itself: router, weights, experts, shared
experts. What lies between them stays eager: the choice of experts and the dispatch wait for the
device, own collectives of uneven sizes, and are replayed by recomputation; FSDP gathers the experts
in hooks of their own. Only the experts' rows change in number from step to step: their piece alone
is compiled for any number of rows, so that nothing is compiled again.

Attention under context parallelism stays eager, for its collectives; so does compiled flex
attention, which is compiled already.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from titan_moe.config.layout import Compile
from titan_moe.moe.layer import MoE

# Entries of one function's cache: blocks of all kinds, in training and in validation, share it.
_RECOMPILE_LIMIT = 64


def apply_compile(blocks: Iterable[nn.Module], section: Compile, *, eager_attention: bool) -> None:
    """Compile blocks whose parameters are cut over tp, ep and etp already, and whose forward is not
    yet wrapped by recomputation: a recomputation runs the compiled block again.

    Args:
        eager_attention: whether attention cores must not be traced.
    """
    if not section.enable or "model" not in section.components:
        return
    import torch._dynamo

    # Registers what grouped_mm is in a graph.
    import titan_moe.ops.grouped_mm_opaque  # noqa: F401

    torch._dynamo.config.recompile_limit = max(
        torch._dynamo.config.recompile_limit, _RECOMPILE_LIMIT
    )
    for block in blocks:
        for module in block.modules():
            if isinstance(module, MoE):
                _compile_pieces(module, section.backend)
            elif eager_attention and hasattr(module, "core"):
                core: Any = module.core
                module.core = torch.compiler.disable(core.__call__)
        _compile_attribute(block, "forward", section.backend)


def compile_loss(loss: Callable[..., Any], section: Compile) -> Callable[..., Any]:
    """The loss compiled, if the section says so."""
    if not section.enable or "loss" not in section.components:
        return loss
    return torch.compile(loss, backend=section.backend)


class Compiled(NamedTuple):
    """What a process has compiled."""

    graphs: int
    breaks: int
    """Places where a graph ends because what follows cannot be, or is not to be, traced."""
    seconds: float


def compiled_so_far() -> Compiled:
    """By this process, forward and backward."""
    from torch._dynamo.utils import calculate_time_spent, counters

    return Compiled(
        counters["stats"]["unique_graphs"],
        sum(counters["graph_break"].values()),
        calculate_time_spent().get("total_wall_time", 0.0),
    )


def _compile_pieces(moe: MoE, backend: str) -> None:
    # The attribute is looked up once per call; the orchestration between the pieces is Python.
    moe.forward = torch.compiler.disable(moe.forward)  # type: ignore[method-assign]
    _compile_attribute(moe.router, "forward", backend)
    _compile_attribute(moe.router, "gating_weights", backend)
    _compile_attribute(moe.experts, "compute", backend, dynamic=True)
    if moe.shared_experts is not None:
        _compile_attribute(moe.shared_experts, "forward", backend)


def _compile_attribute(
    holder: nn.Module, name: str, backend: str, *, dynamic: bool | None = None
) -> None:
    compiled = torch.compile(getattr(holder, name), backend=backend, dynamic=dynamic)
    setattr(holder, name, compiled)
