"""Mistakes that part the members of a group, which `titan-moe simulate collectives` must find: each
changes one line of production code, as in planted_bugs.py."""

from typing import NamedTuple

from tests.support.planting import plant, right_source
from titan_moe.config.parse import load_job
from titan_moe.simulate.collectives import WorldReport, run_world, smallest_task

_SMALL = ("--training.loss_chunk_size", "0", "--training.local_batch_size", "1")
_EXPERTS = ("--parallelism.expert_parallel_degree", "4")
_SYMMETRIC = (*_EXPERTS, "--parallelism.expert_parallel_comm_backend", "symmetric")
_PIPELINE = ("--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "4")


class Desync(NamedTuple):
    """One line of production code, written wrongly."""

    where: str
    """module:function or module:class.method"""
    right: str
    """Stands in one line of it, once."""
    wrong: str
    part: str
    """Of the run in which it must be found, and not before."""
    group: str
    says: tuple[str, ...]
    """What stands in the line."""
    ranks: int = 2
    options: tuple[str, ...] = ()
    family: str = "qwen3"


DESYNCS = {
    "a rank without tokens leaves an exchange out": Desync(
        "titan_moe.distributed.collectives:AllToAll.start",
        "return _functional.all_to_all_single(x_RD.contiguous(), self.received, self.sent, name)",
        "return _functional.all_to_all_single(x_RD.contiguous(), self.received, self.sent, name) "
        "if sum(self.sent) else x_RD.new_empty((sum(self.received), *x_RD.shape[1:]))",
        part="one rank",
        group="ep group 0-3",
        says=(
            "rank 3 issues all_to_all float64 as 4th collective in layers.0's combine, forward",
            "ranks 0-2 issue all_to_all float64 as 4th collective in layers.0's combine, backward",
        ),
        ranks=4,
        options=_EXPERTS,
    ),
    "a rank exchanges weights before rows": Desync(
        "titan_moe.moe.dispatch.exchange:ExchangeDispatcher.send",
        "all_to_all_start(x_ND, route.rows), all_to_all_start(weights_N1, route.weights)",
        "*(lambda x, w: (x(), w()) if self.ep_group.rank() else (w(), x())[::-1])("
        "lambda: all_to_all_start(x_ND, route.rows), "
        "lambda: all_to_all_start(weights_N1, route.weights))",
        part="even",
        group="ep group 0-3",
        says=("rank 0 sends", "elements to rank 1", "layers.0's dispatch, forward"),
        ranks=4,
        options=_EXPERTS,
    ),
    "a rank sums in another type": Desync(
        "titan_moe.distributed.collectives:sum_over_world",
        "dist.all_reduce(flat)",
        "dist.all_reduce(flat.float() if dist.get_rank() == 1 else flat)",
        part="even",
        group="group 0-1",
        says=("all_reduce float32[", "all_reduce float64[", "grad_norm"),
    ),
    "a rank without targets sums once more": Desync(
        "titan_moe.train_step:TrainStep._reduce",
        "sums = sum_over_world(terms)",
        "sums = sum_over_world(terms) if sum(num_local_targets(b, self._sharded) for b in batches) "
        "else sum_over_world(sum_over_world(terms))",
        part="masked rank",
        group="group 0-1",
        says=("rank 0 issues all_reduce", "rank 1 issues no 12th collective"),
    ),
    "both ends of a pair send": Desync(
        "titan_moe.distributed.tied_weights:_exchanged",
        "dist.P2POp(dist.irecv, received, partner, group)",
        "dist.P2POp(dist.irecv if dist.get_rank() else dist.isend, received, partner, group)",
        part="even",
        group="pp group 0-1",
        says=("message from rank", "tied_weights.py:sum_tied_grads"),
        options=_PIPELINE,
        family="deepseek_v3",
    ),
    "ranks make their groups in a circle": Desync(
        "titan_moe.distributed.mesh:build_mesh",
        "for axis in _EVERY_RUN:",
        "for axis in _EVERY_RUN[:: -1 if dist.get_rank() in (1, 2) else 1]:",
        part="start",
        group="group",
        says=("group after the world's, but not by rank",),
        ranks=4,
        options=("--parallelism.expert_parallel_degree", "2"),
    ),
}


def run_with(names: list[str]) -> dict[str, WorldReport]:
    """What is found with each of these mistakes, and with none ("")."""
    return {name: _run_with(name) for name in names}


def _run_with(name: str) -> WorldReport:
    bug = DESYNCS[name or "a rank exchanges weights before rows"]
    options = bug.options if name else _SYMMETRIC
    job = load_job(["--job.config_file", f"debug/gate_{bug.family}", *_SMALL, *options])
    task = smallest_task(job, bug.ranks, seq_len=32)
    if not name:
        return run_world(task)
    function, _ = right_source(bug)
    right = function.__code__
    plant(bug)
    try:
        return run_world(task)
    finally:
        function.__code__ = right
