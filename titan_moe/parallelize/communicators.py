"""Estimates the buffers of NCCL's communicators. Imports no torch.

NCCL documents no sizes: its authors say that memory grows with communicators, channels and peers
that are sent to (github.com/NVIDIA/nccl, issue 864). The sizes here are what its users' logs and
issues show; torch 2.13 brings NCCL 2.29. A run logs the memory in use beside the estimate.
`NCCL_NVLS_ENABLE=0` and `NCCL_MAX_P2P_NCHANNELS` make it less.
"""

from bisect import bisect_left
from functools import lru_cache

from titan_moe.distributed.parallel_dims import GROUP_AXES, TOKEN_AXES, ParallelDims
from titan_moe.parallelize.plan import Plan

_MIB = 2**20
NODE = 8
"""GPUs of a node."""
_CHANNEL = 14 * _MIB
"""Buffers of a channel from and to one peer. The first all-to-all of 8 H100s took 3.28 GB, for 32
channels to each of 7 peers (issue 1685)."""
_P2P_CHANNELS, _P2P_CHANNELS_OF_MANY_NODES = 32, 2
"""Channels of sends to a peer of the same node, as logs of H100s have them: "32 p2p channels per
peer", and 2 in a communicator of several nodes."""
_SHARED = 512 * _MIB
"""Buffers that all sends to other nodes share (issue 2363)."""
_NEIGHBOURS = 2 * 24 * _CHANNEL
"""Buffers of the rings and trees of collectives, 24 channels each: 672 MiB, where a communicator of
four A100s was seen to take 688 MB (issue 964)."""
_NVLS = 32 * _MIB
"""Buffers of NVLink SHARP for each of a node's ranks, if they are more than two: logs of 8 H100s
say "nvlsTotalSize 268435456", and of NCCL 2.18.3 six times as much."""


def communicators(plan: Plan) -> dict[tuple[tuple[int, ...], str], int]:
    """Returns the bytes of NCCL's buffers for each of rank 0's groups of more than one rank.

    A key is the ranks, and what travels between them (`process_groups.GroupKind`).
    Exchanges of a change of layout, and Muon's over edp and etp joined, are left out.
    """
    rotates = plan.job.parallelism.context_parallel_rotate_method != "allgather"
    on_node = plan.dims.ranks_on_node(plan.dispatch.ranks_per_node or plan.dims.world_size)
    if plan.dispatch.name != "deduplicated":
        on_node = None
    muon, apart = plan.job.optimizer.name == "Muon", plan.job.comm.separate_reduce_scatter
    return _communicators(plan.dims, muon, rotates, on_node, apart)


@lru_cache(maxsize=1024)
def _communicators(
    dims: ParallelDims, muon: bool, cp: bool, on_node: int | None, apart: bool
) -> dict[tuple[tuple[int, ...], str], int]:
    """`muon`, `cp`: ranks send to each other for these. `on_node`: ranks of an ep group on each
    node, if tokens travel in two levels. `apart`: gradients have groups of their own."""
    sends = {"ep": True, "pp": True, "cp": cp, "fsdp": muon, "edp": muon}
    found = {(tuple(range(dims.world_size)), "parameters"): False}
    for axis in (*GROUP_AXES, "cp", "sequence"):
        kind = dims.group_of(0, axis), "tokens" if axis in TOKEN_AXES else "parameters"
        found[kind] = found.get(kind, False) or sends.get(axis, False)
    if muon and dims.tp > 1 and dims.size("fsdp") > 1:
        found[dims.group_of(0, ("fsdp", "tp")), "parameters"] = True
    if on_node is not None:
        ranks = dims.group_of(0, "ep")
        found[ranks[:on_node], "tokens"] = found[ranks[::on_node], "tokens"] = True
    for axis in ("fsdp", "edp") if apart else ():
        found[dims.group_of(0, axis), "gradients"] = False
    return {kind: communicator_bytes(kind[0], found[kind]) for kind in found if len(kind[0]) > 1}


def communicator_bytes(ranks: tuple[int, ...], sends: bool) -> int:
    """Returns the bytes of a communicator's buffers on the first of its ranks, which ascend.
    `sends`: ranks send to each other, too."""
    here = bisect_left(ranks, (ranks[0] // NODE + 1) * NODE)
    size = _NEIGHBOURS + (here * _NVLS if here > 2 else 0)
    if sends:
        is_one_node = here == len(ranks)
        channels = _P2P_CHANNELS if is_one_node else _P2P_CHANNELS_OF_MANY_NODES
        size += (here - 1) * channels * _CHANNEL + (0 if is_one_node else _SHARED)
    return size
