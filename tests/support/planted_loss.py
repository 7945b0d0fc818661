"""Imported by a run (job.imports), makes its loss and all gradients 0.1 % too large, as a divisor
that is too small does."""

from types import SimpleNamespace

from tests.support.planting import plant

plant(
    SimpleNamespace(
        where="titan_moe.models.output:Output.forward",
        right="return losses.loss",
        wrong="return losses.loss * 1.001",
    )
)
