"""The optimizer and its learning rate."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from titan_moe.config.section import Section


class Optimizer(Section):
    """The optimizer. Norms and biases take no weight decay."""

    name: Literal["AdamW", "Adam", "Muon"] = "AdamW"
    """AdamW decays weights directly; Adam adds the decay to the gradient; Muon makes the momentum
    of layers' matrices orthogonal, and is AdamW for embeddings, output, routers, norms and biases.
    """
    lr: NonNegativeFloat = 8e-4
    """Peak learning rate."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the square root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay per unit of learning rate."""
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """How torch runs Adam's update."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """What moments are kept in. float32: whatever the parameters are kept in (training.dtype);
    bfloat16: half the memory, each rounded to nearest after an update in the parameters' type."""
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    """Muon's decay of the momentum, which is Nesterov's."""
    muon_steps: PositiveInt = 5
    """Newton-Schulz steps, in training.dtype."""
    muon_rms: float = Field(0.2, gt=0)
    """Root mean square of an update by Muon in learning rates; 0.2 is about AdamW's."""


class LRScheduler(Section):
    """Warmup, stable, decay."""

    warmup_steps: NonNegativeInt = 200
    """Steps of linear warm-up from 0."""
    total_steps: PositiveInt | None = None
    """Steps the schedule is laid out over; left out: training.steps."""
    decay_ratio: float | None = Field(None, ge=0, le=1)
    """Share of the schedule that decays; left out: everything after the warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end, as a factor of the peak."""
