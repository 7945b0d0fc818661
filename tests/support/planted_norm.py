"""Counts the experts' gradients of one EP group alone in the norm, in a rank that torchrun started
and that imports this module (job.imports)."""

from tests.support.planting import Bug, plant_in_ranks

plant_in_ranks(
    Bug(
        "titan_moe.distributed.grad_norm:_num_pieces",
        "for axis in cut",
        "for axis in cut if axis != 'edp'",
    )
)
