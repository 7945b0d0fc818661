"""One MoE layer forward and backward in bfloat16, beside its grouped GEMMs alone.

    python -m scripts.bench.gpu_moe --json gpu_moe.json
    python -m scripts.bench.gpu_moe --device cpu      # the same code on toy sizes

(T, D, F, E, K): tokens, model dim, expert hidden dim, experts, experts per token. TFLOP/s count the
three grouped GEMMs (6 T K D F forward, twice that backward) over the time of the whole layer:
router, choice, dispatch, experts, combine. "over GEMMs" is that time over the time of the same
GEMMs on the same rows alone, in the same run, by turns; the GEMMs' backward likewise. Balanced
routing gives every expert as many rows; natural routing is a router's on random tokens.

Published beside: SonicMoE (arXiv 2512.14080), ScatterMoE (arXiv 2403.08245) and MegaBlocks (arXiv
2211.15841) on one H100, forward/backward.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from scripts.bench.measure import (
    Goal,
    describe,
    gpu_options,
    is_toy,
    keep,
    medians,
    parse_gpu,
    print_facts,
    print_goals,
)
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.dispatch.base import ExpertRows
from titan_moe.moe.layer import MoE
from titan_moe.ops.grouped_mm import grouped_mm
from titan_moe.runtime.device import peak_flops

Shape = tuple[int, int, int, int, int]
SHAPES: list[Shape] = [
    (32768, 2048, 768, 128, 8),
    (24576, 1536, 256, 128, 8),
    (32768, 4096, 2048, 64, 4),
]
TOY_SHAPES: list[Shape] = [(64, 32, 16, 8, 2)]
# TFLOP/s forward, backward, on one H100.
PUBLISHED: dict[Shape, dict[str, tuple[int, int]]] = {
    SHAPES[1]: {"SonicMoE": (365, 405), "ScatterMoE": (208, 213), "MegaBlocks": (148, 178)},
    SHAPES[2]: {"SonicMoE": (595, 585), "ScatterMoE": (385, 370), "MegaBlocks": (365, 385)},
}
MOST_OVER_GEMMS = {"forward": 1.15, "backward": 1.2}


@dataclass
class Row:
    """One shape, routing and direction."""

    shape: Shape
    routing: str
    direction: str
    busiest: float
    """The busiest expert's rows over the mean."""
    layer_ms: float
    gemms_ms: float
    tflops: float

    @property
    def over_gemms(self) -> float:
        return self.layer_ms / self.gemms_ms

    def published(self) -> dict[str, int]:
        """Others' TFLOP/s in this direction."""
        place = 0 if self.direction == "forward" else 1
        return {name: both[place] for name, both in PUBLISHED.get(self.shape, {}).items()}

    def goals(self) -> list[Goal]:
        name = f"{self.shape} {self.routing} {self.direction}"
        limit = MOST_OVER_GEMMS[self.direction]
        goals = [Goal(f"{name}, over its GEMMs", self.over_gemms, limit, at_most=True)]
        others = [other for other in self.published().items() if other[0] != "MegaBlocks"]
        return goals + [
            Goal(f"{name}, TFLOP/s of {other}", self.tflops, tflops) for other, tflops in others
        ]


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_gpu(gpu_options(__doc__), argv)
    print_facts(describe(arguments.device))
    rows: list[Row] = []
    for shape in TOY_SHAPES if is_toy(arguments) else SHAPES:
        for routing in ("balanced", "natural"):
            for row in measure(shape, routing, arguments.repeats, arguments.device):
                rows.append(row)
                goals = [goal for row in rows for goal in row.goals()]
                keep(arguments, [figures_of(row, arguments.device) for row in rows], goals)
    print_goals(arguments, goals)


def figures_of(row: Row, device: str) -> dict[str, Any]:
    """Returns a row for JSON, with the shares of the device's peak that layer and GEMMs reach."""
    figures = asdict(row) | {"over_gemms": row.over_gemms, "published": row.published()}
    if peak := peak_flops(torch.device(device)):
        share = row.tflops * 1e12 / peak
        figures |= {"of_peak": share, "gemms_of_peak": share * row.over_gemms}
    return figures


def measure(shape: Shape, routing: str, repeats: int, device: str) -> list[Row]:
    """Measures forward and backward."""
    layer, x_BSD = new_layer(shape, routing, device)
    parameters = list(layer.parameters())
    rows = experts_rows(layer, x_BSD)
    gemms = GroupedGemms(layer, rows)
    grad_BSD = torch.randn_like(x_BSD)
    y_BSD = layer(x_BSD)

    def backward() -> None:
        torch.autograd.grad(y_BSD, [x_BSD, *parameters], grad_BSD, retain_graph=True)

    variants = {
        ("layer", "forward"): lambda: layer(x_BSD),
        ("GEMMs", "forward"): gemms.forward,
        ("layer", "backward"): backward,
        ("GEMMs", "backward"): gemms.backward,
    }
    seconds = medians(variants, repeats, device)
    num_tokens, dim, hidden_dim, num_experts, top_k = shape
    flops = 6 * num_tokens * top_k * dim * hidden_dim
    counts_E = rows.offsets_E.diff(prepend=rows.offsets_E.new_zeros(1))
    busiest = counts_E.max().item() * num_experts / (num_tokens * top_k)
    return [
        Row(
            shape,
            routing,
            direction,
            busiest,
            1e3 * seconds["layer", direction],
            1e3 * seconds["GEMMs", direction],
            times * flops / seconds["layer", direction] / 1e12,
        )
        for times, direction in enumerate(("forward", "backward"), 1)
    ]


def new_layer(shape: Shape, routing: str, device: str) -> tuple[MoE, Tensor]:
    """Makes a layer and its tokens."""
    num_tokens, dim, hidden_dim, num_experts, top_k = shape
    config = MoEConfig(
        num_experts=num_experts,
        top_k=top_k,
        hidden_dim=hidden_dim,
        normalize_top_k=True,
        force_load_balance=routing == "balanced",
    )
    with torch.device(device):
        layer = MoE(dim, config, None)
        for parameter in layer.parameters():
            drawn = torch.empty_like(parameter, dtype=torch.bfloat16).normal_(0, dim**-0.5)
            parameter.data = drawn
        x_BSD = torch.randn(1, num_tokens, dim, dtype=torch.bfloat16, requires_grad=True)
    return layer, x_BSD


def experts_rows(layer: MoE, x_BSD: Tensor) -> ExpertRows:
    """Returns the rows that the layer's experts receive for these tokens."""
    taken: list[ExpertRows] = []
    compute = layer.experts.compute
    hook = compute.register_forward_pre_hook(lambda module, args: taken.append(args[0]))
    layer(x_BSD)
    hook.remove()
    (rows,) = taken
    return ExpertRows(rows.x_RD.detach(), rows.weights_R.detach(), rows.offsets_E)


class GroupedGemms:
    """The layer's three grouped GEMMs and their six of the backward, and nothing else."""

    def __init__(self, layer: MoE, rows: ExpertRows) -> None:
        experts, x_RD, offsets_E = layer.experts, rows.x_RD, rows.offsets_E
        hidden_RF = torch.randn(len(x_RD), experts.w1.shape[1]).to(x_RD)
        assert experts.w3 is not None
        inputs = [(x_RD, experts.w1), (x_RD, experts.w3), (hidden_RF, experts.w2)]
        self._products = [_product(x, w.detach(), offsets_E) for x, w in inputs]

    def forward(self) -> None:
        for multiply, _ in self._products:
            multiply()

    def backward(self) -> None:
        for _, differentiate in self._products:
            differentiate()


def _product(
    x: Tensor, w: Tensor, offsets_E: Tensor
) -> tuple[Callable[[], Tensor], Callable[[], object]]:
    """Returns a grouped GEMM, and both gradients of it."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = grouped_mm(x, w, offsets_E)
    grad = torch.randn_like(y)

    def multiply() -> Tensor:
        with torch.no_grad():
            return grouped_mm(x, w, offsets_E)

    return multiply, lambda: torch.autograd.grad(y, (x, w), grad, retain_graph=True)


if __name__ == "__main__":
    main()
