"""Operations of a step that add up over tokens: bfloat16 against float64 of the same numbers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from titan_moe.distributed.context_parallel.blocks import ExplicitBlocks, Upstream
from titan_moe.models.feed_forward import FeedForward
from titan_moe.models.gated_delta_net import GatedDeltaNet
from titan_moe.models.output import Embedding, LayerNorm, ZeroCentredRMSNorm
from titan_moe.models.recurrent_config import GatedDeltaConfig
from titan_moe.moe import balance
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.dispatch.base import ExpertRows
from titan_moe.moe.layer import Experts
from titan_moe.moe.router import Router
from titan_moe.ops.activation import CLAMPED_SWIGLU
from titan_moe.ops.attention import Sdpa, sdpa
from titan_moe.ops.gated_delta import Recurrence, chunked_rule
from titan_moe.ops.grouped_mm import add_bias
from titan_moe.ops.linear_cross_entropy import linear_cross_entropy
from titan_moe.ops.move_rows import add_rows
from titan_moe.ops.recomputed import short_convolution
from titan_moe.ops.sparse_attention import Index, SparseAttention

TOKENS, KEYS, ROW = 32_768, 64, 512
FEW = 3072
"""Most tokens of an embedding for which torch has another kernel on CUDA."""
D, E, V = 32, 4, 256
BOUND = 0.01

Case = tuple[Callable[..., Any], list[Tensor]]
"""A function, and its arguments that get gradients."""


class Draw:
    """Draws values of a case, the same on every device."""

    def __init__(self, device: str) -> None:
        self.device, self._generator = device, torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, mean: float = 0.3, dtype=torch.bfloat16) -> Tensor:
        drawn = mean + torch.randn(shape, generator=self._generator)
        return drawn.to(self.device, dtype)

    def tokens(self) -> Tensor:
        """Half of them are one token, as spaces in bytes of text may be."""
        drawn = torch.randint(0, 2 * V, (TOKENS,), generator=self._generator)
        return torch.where(drawn < V, drawn, 7).to(self.device)

    def ends(self) -> Tensor:
        """Ends of the experts' rows: one has a half of all."""
        ends = torch.tensor([1, 2, 6, 8]) * (TOKENS // 8)
        return ends.to(self.device, torch.int32)

    def places(self, length: int = ROW) -> Tensor:
        return torch.arange(length, device=self.device)[None]


def of_module(
    draw: Draw,
    module: nn.Module,
    *inputs: Tensor,
    arguments: Callable[..., tuple[Any, ...]] = lambda *inputs: inputs,
    pick: Callable[[Any], Tensor] = lambda found: found,
) -> Case:
    """A module's case, with drawn parameters.

    Args:
        arguments: takes the inputs to the module's arguments.
        pick: takes the module's result to the case's.
    """
    names, count = [name for name, _ in module.named_parameters()], len(inputs)
    weights = [
        draw(*p.shape, mean=1.0) if p.ndim == 1 else draw(*p.shape, mean=0.0) / p.shape[-1] ** 0.5
        for p in module.parameters()
    ]

    def run(*values: Tensor) -> Tensor:
        given = dict(zip(names, values[count:], strict=True))
        return pick(functional_call(module, given, arguments(*values[:count])))

    return run, [*inputs, *weights]


def of_embedding(draw: Draw, kind: Any = Embedding, count: int = TOKENS) -> Case:
    tokens = draw.tokens()[:count]
    return of_module(draw, kind(V, D), arguments=lambda: (tokens,))


def attention(draw: Draw, queries: int, keys: int, rows: int) -> list[Tensor]:
    """Queries, keys and values; the first key draws attention, as that of real rows does."""
    q, k, v = (draw(rows, 1, n, 16) for n in (queries, keys, keys))
    k[:, :, 0] += 1
    return [q, k, v]


def _indexed(draw: Draw) -> Case:
    core = SparseAttention(mask_documents=False)
    mask = torch.ones(1, TOKENS, KEYS, dtype=torch.bool, device=draw.device)

    def run(q, k, v, *indexer: Tensor) -> Tensor:
        index = Index(*indexer, None, lambda scores: scores, lambda o, loss: o)
        return core(q, k, v, mask, 0.25, None, index)

    indexer = [draw(1, TOKENS, 2, 16), draw(1, KEYS, 16), draw(1, TOKENS, 2, dtype=torch.float32)]
    return run, [*attention(draw, TOKENS, KEYS, 1), *indexer]


@torch.no_grad()
def _block(q, k, v, grad):
    blocks = ExplicitBlocks()
    o, lse = blocks.forward(q, k, v, None, 0.25)
    delta = (o * grad.to(o.dtype)).sum(-1)
    return blocks.backward(Upstream(q, grad, lse, delta), k, v, None, 0.25)


class _AddsDecay(Recurrence):
    """In place of a recurrence: rounding through one would hide the sums around it."""

    def convolve(self, x_BSC: Tensor, weight_C1W: Tensor, place_BS: Tensor) -> Tensor:
        return x_BSC * weight_C1W.sum((1, 2))

    def __call__(self, q_BGSK, k_BGSK, v_BHSV, place_BS, decay_BHS, beta_BHS):
        decay = decay_BHS if decay_BHS.ndim == 4 else decay_BHS[..., None]
        return (v_BHSV * beta_BHS[..., None] + q_BGSK * k_BGSK + decay).to(v_BHSV.dtype)


def _gates(draw: Draw, gate_rank: int | None) -> Case:
    config = GatedDeltaConfig(2, 2, 8, 8, 4, gate_rank=gate_rank)
    core = _AddsDecay(chunked_rule, mask_documents=False)
    module, place = GatedDeltaNet(D, config, norm_eps=1e-6, core=core), draw.places()
    x_BSD = draw(TOKENS // ROW, ROW, D, mean=0.0)
    return of_module(draw, module, x_BSD, arguments=lambda x: (x, None, place))


def _rule(draw: Draw) -> Case:
    place, shape = draw.places(64), (TOKENS // 64, 64, 1)

    def run(q, k, v, decay, beta, state):
        state = state.expand(len(q), -1, -1, -1)
        return chunked_rule(q, k, v, -decay.abs(), beta.sigmoid(), place + 1, state)[0]

    numbers = [draw(*shape, dtype=torch.float32) for _ in range(2)]
    return run, [*(draw(*shape, 8) for _ in range(3)), *numbers, draw(1, 1, 8, 8)]


def _experts(draw: Draw, **options: Any) -> Case:
    experts = _ExpertsOfRows(D, MoEConfig(num_experts=E, top_k=1, hidden_dim=24, **options))
    inputs, ends = [draw(TOKENS, D), draw(TOKENS, dtype=torch.float32)], draw.ends()
    return of_module(draw, experts, *inputs, arguments=lambda x, r: (ExpertRows(x, r, ends),))


class _ExpertsOfRows(Experts):
    def forward(self, rows: ExpertRows) -> Tensor:  # type: ignore[override]
        return self.compute(rows, dict(self.named_parameters()))


def _loss(draw: Draw) -> Case:
    loss = partial(linear_cross_entropy, labels_T=draw.tokens(), factors=(1.0, 0.3))
    arguments = [draw(TOKENS, D), draw(V, D, mean=0.0)]
    return lambda x, weight: loss(x, weight, chunk_size=4096).loss, arguments


def _balance(draw: Draw) -> Case:
    chosen = torch.full((TOKENS // ROW, E), 2 * ROW // E, device=draw.device)
    load = torch.full((E,), 1 / E, device=draw.device)

    def run(x: Tensor) -> Tensor:
        losses = balance.sequence_loss(x, chosen), balance.global_loss(x, load), balance.z_loss(x)
        return torch.stack(losses)

    return run, [draw(TOKENS // ROW, ROW, E, dtype=torch.float32)]


ROUTER = MoEConfig(num_experts=E, top_k=2, hidden_dim=8, router_bias=True)
CASES: dict[str, Callable[[Draw], Case]] = {
    "embedding": of_embedding,
    "embedding of few tokens": partial(of_embedding, count=FEW),
    "norm": lambda draw: of_module(draw, nn.RMSNorm(D), draw(TOKENS, D)),
    "norm of heads": lambda draw: of_module(draw, nn.RMSNorm(16), draw(TOKENS, 4, 16)),
    "zero-centred norm": lambda draw: of_module(draw, ZeroCentredRMSNorm(D), draw(TOKENS, D)),
    "norm with a bias": lambda draw: of_module(draw, LayerNorm(D), draw(TOKENS, D)),
    "projection with a bias": lambda draw: of_module(draw, nn.Linear(D, 24), draw(TOKENS, D)),
    "shared experts": lambda draw: of_module(draw, FeedForward(D, 24, gated=True), draw(TOKENS, D)),
    "router": lambda draw: of_module(
        draw, Router(D, ROUTER), draw(TOKENS, D), pick=lambda scores: scores.logits_TE
    ),
    "experts": _experts,
    "experts with biases": partial(_experts, projection_bias=True, activation=CLAMPED_SWIGLU),
    "experts of weighted tokens": partial(_experts, weights_scale="inputs"),
    "biases of weighted rows": lambda draw: (
        partial(lambda ends, y, bias, weights: add_bias(y, bias, ends, weights), draw.ends()),
        [draw(TOKENS, 24), draw(E, 24), draw(TOKENS, 1, dtype=torch.float32)],
    ),
    "rows of a token": lambda draw: (
        partial(lambda rows, y: add_rows(y, rows), draw.places(TOKENS).view(8, -1).t()),
        [draw(TOKENS, D)],
    ),
    "attention in rows": lambda draw: (
        lambda q, k, v: Sdpa()(q, k, v, None, 0.25), attention(draw, ROW, ROW, TOKENS // ROW)
    ),
    "sinks": lambda draw: (
        lambda q, k, v, sinks: Sdpa()(q, k, v, None, 0.25, sinks),
        [*attention(draw, ROW, ROW, TOKENS // ROW), draw(1)],
    ),
    "attention of many queries": lambda draw: (
        lambda q, k, v: sdpa(q, k, v, None, 0.25), attention(draw, TOKENS, KEYS, 1)
    ),
    "block of context parallelism": lambda draw: (
        _block, [*attention(draw, TOKENS, KEYS, 1), draw(1, 1, TOKENS, 16)]
    ),
    "indexer": _indexed,
    "convolution": lambda draw: (
        partial(lambda place, x, w: short_convolution(x, w, place), draw.places()),
        [draw(TOKENS // ROW, ROW, D), draw(D, 1, 4)],
    ),
    "recurrence": _rule,
    "decay of heads": partial(_gates, gate_rank=None),
    "decay of channels": partial(_gates, gate_rank=16),
    "loss": _loss,
    "balance": _balance,
}  # fmt: skip


def _values(function: Callable[..., Any], leaves: list[Tensor]) -> list[Tensor]:
    found = function(*leaves)
    if isinstance(found, tuple):
        return list(found)
    upstream = Draw(found.device.type)(*found.shape, mean=1.0 if not found.ndim else 0.3)
    return [found, *torch.autograd.grad(found, leaves, upstream.to(found.dtype))]


def errors(case: Case) -> list[float]:
    """Relative errors of a case's results, then of the gradients of its arguments in order."""
    function, given = case
    narrow = _values(function, [x.clone().requires_grad_() for x in given])
    exact = _values(function, [x.double().requires_grad_() for x in given])
    pairs = zip(narrow, exact, strict=True)
    return [((x.double() - y.double()).norm() / y.double().norm()).item() for x, y in pairs]
