"""Recompute by operation inside compiled graphs.

torch compiles the forward and the backward of a piece from one joint graph, and its partitioner
decides what the forward hands over. By itself it also keeps what the backward would have to write
to memory again, such as the operands of products. Told so by marks on the graph's nodes, it makes
everything again that is neither a matrix product nor attention nor a collective, nor follows from a
choice: a top-k of scores that a fused kernel rounds otherwise might select other experts.

The marks are those of torch's own selective checkpoint, which sets them on what a
`torch.utils.checkpoint` inside a graph traces. That would not do here: it wants a whole layer
without a break, and a layer that waits for split sizes has some. Nor would torch's setting
aggressive_recomputation: it chooses experts and multiplies their rows again (a test shows it).
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import get_default_op_list, min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

# Beside those that torch's partitioner calls compute-intensive.
_KEPT = ("aten._scaled_grouped_mm", "aten.baddbmm", "aten._scaled_dot_product")


class KeepResults(CustomPartitionerFn):
    """torch's partitioner, told to keep the results of products, attention and collectives."""

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        op_types = get_default_op_list()
        for node in gm.graph.nodes:
            if _is_cheap(node) and not op_types.is_compute_intensive(node):
                node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
                node.meta["ac_graph_id"] = 0  # All of one region.
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        """A part of the key of Inductor's cache."""
        return get_hash_for_files((__file__,))


def _is_cheap(node: fx.Node) -> bool:
    operation = node.target
    if not isinstance(operation, torch._ops.OpOverload):
        return False
    if operation.namespace not in ("aten", "prims") or str(operation).startswith(_KEPT):
        return False
    results = [x for x in tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)]
    return bool(results) and all(x.is_floating_point() for x in results)


keep_results = KeepResults()


aot_eager_keeping_results = aot_autograd(
    fw_compiler=boxed_nop, partition_fn=keep_results, keep_inference_input_mutations=True
)
