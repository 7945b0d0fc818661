"""Adapters against weights that are added up: the same outputs, and gradients by the chain rule."""

import pytest
import torch

from tests.support.gated_cases import ACTIVATIONS
from tests.support.grouped_mm_cases import TOLERANCE
from tests.support.tiny import make_job, tiny
from titan_moe.config.job_config import Lora
from titan_moe.models.decoder import ADAPTER, Decoder
from titan_moe.models.lora import adapt, adaptable
from titan_moe.moe.dispatch.base import ExpertRows
from titan_moe.moe.experts import AdaptedOutputs, ExpertOutputs
from titan_moe.ops import grouped_mm
from titan_moe.ops.activation import SWIGLU, Activation

COUNTS, TAIL, D, F, RANK, SCALE = [3, 0, 5, 1], 2, 8, 16, 8, 0.7
OFFSETS = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32)
SHAPES = {
    "w1": (4, F, D),
    "w2": (4, D, F),
    "w3": (4, F, D),
    "adapter.w13_a": (4, RANK, D),
    "adapter.w1_b": (4, F, RANK),
    "adapter.w3_b": (4, F, RANK),
    "adapter.w2_a": (4, RANK, F),
    "adapter.w2_b": (4, D, RANK),
}


def stacks(dtype: torch.dtype, activation: Activation = SWIGLU) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {name: shape for name, shape in SHAPES.items() if activation.gated or "w3" not in name}
    drawn = {name: 0.5 * torch.randn(shape) for name, shape in shapes.items()}
    found = {name: w.to(dtype) for name, w in drawn.items()}
    for name, w in found.items():
        w.requires_grad_("adapter" in name)
    return found


def added_up(w: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights with their adapters' products, in float64."""
    w = {name: each.double() for name, each in w.items()}
    firsts = {"w1": "w13_a", "w2": "w2_a", "w3": "w13_a"}
    return {
        name: w[name] + SCALE * w[f"adapter.{name}_b"] @ w[f"adapter.{a}"]
        for name, a in firsts.items()
        if name in w
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale_inputs", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_adapted_experts_equal_experts_of_merged_weights(
    name: str, scale_inputs: bool, dtype: torch.dtype
):
    activation = ACTIVATIONS[name]
    weights, real = stacks(dtype, activation), sum(COUNTS)
    x = torch.randn(real + TAIL, D).to(dtype)
    x[real:] = torch.nan  # Rows of no expert.
    x.requires_grad_()
    factors = torch.rand(real + TAIL)
    compute = AdaptedOutputs(activation, scale_inputs=scale_inputs, scale=SCALE)
    trained = [x, *(w for w in weights.values() if w.requires_grad)]
    grad = torch.randn(real, D).to(dtype)

    ours = compute(ExpertRows(x, factors, OFFSETS), weights)[:real]
    found = torch.autograd.grad(ours, trained, grad)
    wide = ExpertRows(x.double(), factors.double(), OFFSETS)
    merged = ExpertOutputs(activation, scale_inputs=scale_inputs)
    theirs = merged(wide, added_up(weights))[:real]
    wanted = torch.autograd.grad(theirs, trained, grad.double())

    bound = TOLERANCE[dtype]
    for a, b in zip([ours, *found], [theirs, *wanted], strict=True):
        rows = slice(0, real if len(a) == len(x) else None)
        a, b = a[rows].double(), b[rows].double()
        assert (a - b).norm() <= bound * b.norm()
    # The second expert has no token, and no gradient.
    assert all(not of_stack[1].any() for of_stack in found[1:])


def test_frozen_weights_cost_no_product(monkeypatch: pytest.MonkeyPatch):
    weights, shapes = stacks(torch.float64), []
    real = grouped_mm.grouped_mm_grad_weights

    def counted(grad, x, w, offsets):
        shapes.append(tuple(w.shape))
        return real(grad, x, w, offsets)

    monkeypatch.setattr(grouped_mm, "grouped_mm_grad_weights", counted)
    x = torch.randn(sum(COUNTS), D, dtype=torch.float64, requires_grad=True)
    rows = ExpertRows(x, torch.rand(len(x), dtype=torch.float64), OFFSETS)
    compute = AdaptedOutputs(SWIGLU, scale_inputs=False, scale=SCALE)
    compute(rows, weights).sum().backward()
    assert sorted(shapes) == sorted(SHAPES[name] for name in SHAPES if "adapter" in name)


@pytest.mark.parametrize(
    "targets, parts",
    [
        (["experts"], {"experts"}),
        (["layers.0.*", "shared_experts"], {"attention", "feed_forward", "shared_experts"}),
        (Lora().targets, {"attention", "feed_forward", "shared_experts", "experts"}),
    ],
)
def test_targets_name_the_layers_with_adapters(targets: list[str], parts: set[str]):
    job = make_job("deepseek_v3", lora={"rank": 2, "targets": targets})
    with torch.device("meta"):
        model = Decoder(tiny(job))
        before = {name for name, _ in model.named_parameters()}
        layers = set(adaptable(model))
        adapt(model, job.lora)
    names = {name for name, _ in model.named_parameters()}
    assert before < names and all(ADAPTER in name for name in names - before)
    adapted = {name.partition(ADAPTER)[0] for name in names - before}
    assert adapted <= layers
    assert {part for name in adapted for part in name.split(".")} & {
        "attention", "feed_forward", "shared_experts", "experts", "router", "output",
    } == parts  # fmt: skip
