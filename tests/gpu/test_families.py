"""Loss and gradients of a step of every family in float32: CUDA against the CPU."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from scripts.bench.train_steps import new_training, world_of_one
from tests.support.tiny import FirstGradients, whole
from titan_moe.models.registry import FAMILIES

MODELS = [*((family, "debugmodel") for family in FAMILIES), ("qwen3", "debugmodel_moe")]
BOUND = 1e-3
"""Float32's sums in another order stay far below it: they differ by 1e-6 to 1e-4."""


def step(
    model: tuple[str, str], device: str, weights: Mapping[str, Tensor] | None = None
) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Returns the loss, the gradients and the weights before the step; of `weights` if given."""
    tables = {
        "model": dict(zip(("name", "flavor"), model, strict=True)),
        # No more tokens than the indexer of a debug model selects: rounding would select others.
        "training": {
            "seq_len": 64,
            "local_batch_size": 4,
            "mixed_precision_param": "float32",
        },
        "activation_checkpoint": {"mode": "none"},
    }
    own = torch.device(device, 0 if device == "cuda" else None)
    with world_of_one(own):
        training = new_training(tables, own)
        drawn = {}
        with torch.no_grad():
            for name, parameter in training.sharded.named_parameters():
                if weights is not None:
                    whole(parameter).copy_(weights[name])
                drawn[name] = whole(parameter).cpu().clone()
        seen = FirstGradients(training.sharded)
        loss = training.step([training.batch], observer=seen).loss
    return loss, {name: grad.cpu() for name, grad in seen.found.items()}, drawn


@pytest.mark.parametrize("model", MODELS, ids="/".join)
def test_loss_and_gradients_on_cuda_are_those_of_the_cpu(
    model: tuple[str, str], record_property: Callable[[str, object], None]
) -> None:
    loss, expected, weights = step(model, "cpu")
    found, grads, _ = step(model, "cuda", weights)
    errors = {
        name: ((grads[name] - grad).norm() / grad.norm().clamp_min(1e-20)).item()
        for name, grad in expected.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    record_property("loss, relative error", abs(found / loss - 1))
    record_property("gradients, worst relative error", f"{errors[worst]:.1e} ({worst})")
    assert found == pytest.approx(loss, rel=1e-5)
    assert errors[worst] < BOUND, worst
