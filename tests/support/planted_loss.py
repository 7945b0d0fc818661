"""Makes the loss and all gradients 0.1 % too large by a wrong divisor, in a rank that torchrun
started and that imports this module (job.imports)."""

from tests.support.planting import Bug, plant_in_ranks

BUG = Bug(
    "titan_moe.models.output:Output.forward", "return losses.loss", "return losses.loss * 1.001"
)

plant_in_ranks(BUG)
