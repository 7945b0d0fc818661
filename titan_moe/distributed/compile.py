"""torch.compile, block by block.

A block is traced on its own, by `Module.compile`, so that a model of many equal layers is compiled
once. Its hooks, such as FSDP's, run outside of the graph. Where the dispatcher's sizes are fixed, a
layer with a mixture of experts is one graph like any other: its exchanges are functional
collectives, and moves of rows are operations that no graph looks into.

Where the host waits for split sizes, or where the layer is recomputed whole and its choice of
experts replayed, the layer is an `EagerMoE`, and the pieces of it that compute are compiled each by
itself: router, weights, experts, shared experts. What lies between them stays eager. Only the
experts' rows change in number from step to step: their piece alone is compiled for any number of
rows, so that nothing is compiled again. Where FSDP gathers the experts apart, its hooks end a graph
too.

Recompute by operation is the graphs' affair (`graph_recompute.py`): no checkpoint is around the
block, and what lies between two graphs is not made again.

Attention cores that exchange tensors, are compiled already or loop over a row stay eager: they say
so where they are defined.

Asynchronous tensor parallelism is torch's micro-pipeline pass over the graphs: products hide the
collectives next to them, part by part, through symmetric memory. It has not been seen on hardware.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from titan_moe.config.job_config import ActivationCheckpoint, Compile
from titan_moe.distributed.activation_checkpoint import is_recomputed_whole, outside_graphs
from titan_moe.moe.dispatch.base import ExpertRows
from titan_moe.moe.experts import ExpertOutputs, ExpertWeights
from titan_moe.moe.layer import MoE

# Entries of one function's cache: blocks of all kinds, in training and in validation, share it.
_RECOMPILE_LIMIT = 64


def apply_compile(
    blocks: Iterable[Any],
    section: Compile,
    recompute: ActivationCheckpoint,
    *,
    eager_routing: bool = False,
    pipelined_tp: ProcessGroup | None = None,
) -> None:
    """Compile the decoder's blocks, whose parameters are cut over tp, ep and etp already, and which
    are not yet recomputed: a recomputation runs the compiled block again.

    Args:
        recompute: how they will be recomputed.
        eager_routing: whether the choice of experts must not be traced, as where it is recorded.
        pipelined_tp: the tp group whose collectives products hide; None: they stay apart.
    """
    if not section.compiles_layers:
        return
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(
        torch._dynamo.config.recompile_limit, _RECOMPILE_LIMIT
    )

    options = _options(section.backend, recompute.by_operation)
    if pipelined_tp is not None:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        enable_symm_mem_for_group(pipelined_tp.group_name)
        of_inductor = {"_micro_pipeline_tp": True, **options.get("options", {})}
        options = {**options, "options": of_inductor}
    for block in blocks:
        in_pieces = eager_routing or is_recomputed_whole(block.layer, recompute)
        if block.moe is not None and (in_pieces or block.moe.dispatcher.waits_for_host):
            _compile_pieces(block.moe, options)
            block.moe.__class__ = EagerMoE  # The way in which fully_shard makes units of modules.
        block.compile(**options)


def compile_loss(
    loss: Callable[..., Any], section: Compile, device_type: str
) -> Callable[..., Any]:
    """The loss compiled, if the section says so; on CUDA it is a kernel of our own."""
    if not section.enable or "loss" not in section.components or device_type == "cuda":
        return loss
    return torch.compile(loss, backend=section.backend)


def compiled_so_far() -> tuple[int, int, float]:
    """Returns what this process has compiled so far, forward and backward: the numbers of graphs
    and of graph breaks, which are places where a graph ends because what follows cannot be, or is
    not to be, traced; and the seconds spent compiling."""
    from torch._dynamo.utils import calculate_time_spent, counters

    return (
        counters["stats"]["unique_graphs"],
        sum(counters["graph_break"].values()),
        calculate_time_spent().get("total_wall_time", 0.0),
    )


def forget_compiled(section: Compile) -> None:
    """Drop all compiled code, which holds tensors of models that are no longer used."""
    if section.enable:
        import torch._dynamo

        torch._dynamo.reset()


def _options(backend: str, by_operation: bool) -> dict[str, Any]:
    """Returns the keyword arguments of torch.compile."""
    if not by_operation or backend == "eager":  # "eager" traces no backward.
        return {"backend": backend}
    # Imported here: it imports Inductor.
    from titan_moe.distributed.graph_recompute import aot_eager_keeping_results, keep_results

    if backend == "aot_eager":
        return {"backend": aot_eager_keeping_results}
    return {"backend": backend, "options": {"custom_partitioner_fn": keep_results}}


class EagerMoE(MoE):
    """A MoE layer that the graph of its block leaves out."""

    @torch.compiler.disable
    def forward(self, *args: Any) -> Tensor:
        with outside_graphs():
            return super().forward(*args)


def _compile_pieces(moe: MoE, options: dict[str, Any]) -> None:
    import torch._dynamo

    # Where sizes are dynamic, Dynamo makes a global float an input of the graph, and fails if an
    # autograd function reads it.
    torch._dynamo.config.specialize_float = True
    moe.router.compile(**options)
    moe.router.weigh.compile(**options)
    moe.experts.compute.compile(**options)
    moe.experts.compute = ForAnyRows(moe.experts.compute)  # type: ignore[assignment]
    if moe.shared_experts is not None:
        moe.shared_experts.compile(**options)


class ForAnyRows(nn.Module):
    """Makes the number of rows the only size that compiled experts do not know. With `dynamic=True`
    those of the weights were symbols too: Inductor's kernels divided by them for each element."""

    def __init__(self, compute: ExpertOutputs) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, rows: ExpertRows, weights: ExpertWeights) -> Tensor:
        for x_R in (x for x in (rows.x_RD, rows.weights_R, rows.again_RD) if x is not None):
            torch._dynamo.maybe_mark_dynamic(x_R, 0)
        return self.compute(rows, weights)  # type: ignore[no-any-return]
