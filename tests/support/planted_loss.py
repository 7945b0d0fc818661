"""A divisor that is too small: makes the loss and all gradients 0.1 % too large in a rank that
torchrun started and that imports this module (job.imports).

A process that only checks a configuration imports it too, and stays right.
"""

import os
from types import SimpleNamespace

from tests.support.planting import plant


def plant_loss() -> None:
    plant(
        SimpleNamespace(
            where="titan_moe.models.output:Output.forward",
            right="return losses.loss",
            wrong="return losses.loss * 1.001",
        )
    )


if "TORCHELASTIC_RUN_ID" in os.environ:
    plant_loss()
