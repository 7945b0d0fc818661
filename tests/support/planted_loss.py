"""A divisor that is too small: makes the loss and all gradients 0.1 % too large in a rank that
torchrun started and that imports this module (job.imports).

A process that only checks a configuration imports it too, and stays right.
"""

import os

from tests.support.planting import Bug, plant


def plant_loss() -> None:
    where = "titan_moe.models.output:Output.forward"
    plant(Bug(where, "return losses.loss", "return losses.loss * 1.001"))


if "TORCHELASTIC_RUN_ID" in os.environ:
    plant_loss()
