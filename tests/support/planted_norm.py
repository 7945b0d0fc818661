"""A gradient norm over one EP group: makes each group of ep count its own part of the experts as all
of it, in a rank that torchrun started and that imports this module (job.imports)."""

from tests.support.planting import Bug, plant_in_ranks

plant_in_ranks(
    Bug(
        "titan_moe.distributed.grad_norm:_num_pieces",
        "for axis in cut",
        "for axis in cut if axis != 'edp'",
    )
)
