"""Operations of a step that add up over tokens: bfloat16 against float64 of the same numbers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from titan_moe.distributed.context_parallel.blocks import ExplicitBlocks, Upstream
from titan_moe.models.config import GatedDeltaConfig
from titan_moe.models.decoder import FeedForward
from titan_moe.models.gated_delta_net import GatedDeltaNet
from titan_moe.models.output import Embedding, LayerNorm, ZeroCentredRMSNorm
from titan_moe.moe import balance
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.dispatch.base import ExpertRows
from titan_moe.moe.experts import Experts
from titan_moe.moe.router import Router
from titan_moe.ops.attention import Sdpa, sdpa
from titan_moe.ops.gated_delta import Recurrence, chunked_rule, short_convolution
from titan_moe.ops.grouped_mm import add_bias
from titan_moe.ops.linear_cross_entropy import linear_cross_entropy
from titan_moe.ops.move_rows import add_rows
from titan_moe.ops.sparse_attention import Index, SparseAttention

TOKENS, KEYS, ROW = 32_768, 64, 512
FEW = 3072
"""Most tokens for which torch has another kernel on CUDA."""
D, E, V = 32, 4, 256
BOUND = 0.01


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
        """Where experts' rows end: one has a half of all."""
        eighth = TOKENS // 8
        ends = [eighth, 2 * eighth, 6 * eighth, TOKENS]
        return torch.tensor(ends, dtype=torch.int32, device=self.device)

    def places(self, length: int = ROW) -> Tensor:
        return torch.arange(length, device=self.device)[None]


Case = tuple[Callable[..., Any], list[Tensor]]
"""A function, and its arguments that get gradients."""


def of_module(draw: Draw, module: nn.Module, x: Tensor, *rest: Any, pick: Any = None) -> Case:
    """A module's case, with drawn parameters; `pick` takes its output to the result."""
    names = [name for name, _ in module.named_parameters()]
    weights = [draw(*p.shape, mean=0.0 if p.ndim > 1 else 1.0) for p in module.parameters()]
    weights = [w / w.shape[-1] ** 0.5 if w.ndim > 1 else w for w in weights]

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        found = functional_call(module, dict(zip(names, weights, strict=True)), (x, *rest))
        return found if pick is None else pick(found)

    return run, [x, *weights]


def _chosen(draw: Draw) -> Tensor:
    return torch.arange(2 * TOKENS, device=draw.device).view(TOKENS, 2) % E


def _rows_of(x_T: Tensor) -> Tensor:
    """Tokens as rows of a sequence each: [B, S, ...]."""
    return x_T.unflatten(0, (-1, ROW))


def attention(draw: Draw, queries: int, keys: int, rows: int, heads: int = 2) -> list[Tensor]:
    """Queries, keys and values; the first key draws attention, as that of real rows does."""
    q, k, v = (draw(rows, heads, n, 16) for n in (queries, keys, keys))
    k[:, :, 0] += 1
    return [q, k, v]


def _indexed(draw: Draw) -> Case:
    core = SparseAttention(mask_documents=False)
    mask = torch.ones(1, TOKENS, KEYS, dtype=torch.bool, device=draw.device)

    def run(q, k, v, index_q, index_k, weights):  # type: ignore[no-untyped-def]
        index = Index(index_q, index_k, weights, None, lambda scores: scores, lambda o, loss: o)
        return core(q, k, v, mask, 0.25, None, index)

    indexer = [draw(1, TOKENS, 2, 16), draw(1, KEYS, 16), draw(1, TOKENS, 2, dtype=torch.float32)]
    return run, [*attention(draw, TOKENS, KEYS, 1), *indexer]


def _block(draw: Draw) -> Case:
    blocks = ExplicitBlocks(mask_documents=False)

    def run(q, k, v, grad):  # type: ignore[no-untyped-def]
        with torch.no_grad():
            o, lse = blocks.forward(q, k, v, None, 0.25)
            delta = (o * grad.to(o.dtype)).sum(-1)
            return blocks.backward(Upstream(q, grad, lse, delta), k, v, None, 0.25)

    return run, [*attention(draw, TOKENS, KEYS, 1), draw(1, 2, TOKENS, 16)]


class _AddsDecay(Recurrence):
    """In place of a recurrence: rounding through one would hide the sums around it."""

    def __call__(self, q_BGSK, k_BGSK, v_BHSV, place_BS, decay_BHS, beta_BHS):  # type: ignore[no-untyped-def]
        decay = decay_BHS if decay_BHS.ndim == 4 else decay_BHS[..., None]
        return (v_BHSV * beta_BHS[..., None] + q_BGSK * k_BGSK + decay).to(v_BHSV.dtype)


def _gates(draw: Draw, gate_rank: int | None) -> Case:
    config = GatedDeltaConfig(2, 2, 16, 16, 4, 4, gate_rank=gate_rank)
    core = _AddsDecay(chunked_rule, mask_documents=False)
    module = GatedDeltaNet(D, config, norm_eps=1e-6, core=core)
    return of_module(draw, module, _rows_of(draw(TOKENS, D, mean=0.0)), None, draw.places())


def _rule(draw: Draw) -> Case:
    place, shape = draw.places(64), (TOKENS // 64, 64, 1)

    def run(q, k, v, decay, beta, state):  # type: ignore[no-untyped-def]
        state = state.expand(len(q), -1, -1, -1)
        return chunked_rule(q, k, v, -decay.abs(), beta.sigmoid(), place + 1, state)[0]

    numbers = [draw(*shape, dtype=torch.float32) for _ in range(2)]
    return run, [*(draw(*shape, 8) for _ in range(3)), *numbers, draw(1, 1, 8, 8)]


def _experts(draw: Draw, **options: Any) -> Case:
    experts = Experts(D, MoEConfig(num_experts=E, top_k=1, hidden_dim=24, **options))
    ends, names = draw.ends(), [name for name, _ in experts.named_parameters()]
    _, (_, *weights) = of_module(draw, experts, draw(1))

    def run(x: Tensor, routing_R: Tensor, *weights: Tensor) -> Tensor:
        rows = ExpertRows(x, routing_R, ends)
        return functional_call(experts, dict(zip(names, weights, strict=True)), (rows,))

    return run, [draw(TOKENS, D), draw(TOKENS, dtype=torch.float32), *weights]


def of_embedding(
    draw: Draw, module: Callable[[int, int], nn.Module] = Embedding, count: int = TOKENS
) -> Case:
    tokens = draw.tokens()[:count]
    return (
        lambda weight: functional_call(module(V, D), {"weight": weight}, (tokens,)),
        [draw(V, D)],
    )


def _loss(draw: Draw) -> Case:
    labels = draw.tokens()

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, labels, factors=(1.0, 0.3), chunk_size=1024).loss

    return run, [draw(TOKENS, D), draw(V, D, mean=0.0)]


def _balance(draw: Draw, which: str) -> Case:
    chosen = torch.full((TOKENS // ROW, E), 2 * ROW // E, device=draw.device)
    losses = {
        "sequence": lambda x: balance.sequence_loss(x, chosen),
        "global": lambda x: balance.global_loss(x, torch.full((E,), 1 / E, device=draw.device)),
        "z": balance.z_loss,
    }
    return losses[which], [_rows_of(draw(TOKENS, E, dtype=torch.float32))]


CASES: dict[str, Callable[[Draw], Case]] = {
    "embedding": of_embedding,
    "embedding of few tokens": partial(of_embedding, count=FEW),
    "norm": lambda draw: of_module(draw, nn.RMSNorm(D), draw(TOKENS, D)),
    "norm of heads": lambda draw: of_module(draw, nn.RMSNorm(16), draw(TOKENS, 4, 16)),
    "zero-centred norm": lambda draw: of_module(draw, ZeroCentredRMSNorm(D), draw(TOKENS, D)),
    "norm with a bias": lambda draw: of_module(draw, LayerNorm(D), draw(TOKENS, D)),
    "projection with a bias": lambda draw: of_module(draw, nn.Linear(D, 24), draw(TOKENS, D)),
    "gated feed-forward": lambda draw: of_module(
        draw, FeedForward(D, 24, gated=True), draw(TOKENS, D)
    ),
    "router": lambda draw: of_module(
        draw,
        Router(D, MoEConfig(num_experts=E, top_k=2, hidden_dim=8, router_bias=True)),
        draw(TOKENS, D),
        pick=lambda scores: scores.logits_TE,
    ),
    "experts": partial(_experts),
    "experts with biases": partial(_experts, projection_bias=True, activation="clamped_swiglu"),
    "experts of weighted tokens": partial(_experts, weights_scale="inputs"),
    "experts' biases": lambda draw: (
        partial(lambda ends, y, bias, weights: add_bias(y, bias, ends, weights), draw.ends()),
        [draw(TOKENS, 24), draw(E, 24), draw(TOKENS, 1, dtype=torch.float32)],
    ),
    "rows of a token": lambda draw: (
        partial(lambda rows, y: add_rows(y, rows), draw.places(TOKENS).view(8, -1).t()),
        [draw(TOKENS, D)],
    ),
    "attention in rows": lambda draw: (
        lambda q, k, v: Sdpa()(q, k, v, None, 0.25), attention(draw, ROW, ROW, TOKENS // ROW, 1),
    ),
    "sinks": lambda draw: (
        lambda q, k, v, sinks: Sdpa()(q, k, v, None, 0.25, sinks),
        [*attention(draw, ROW, ROW, TOKENS // ROW, 1), draw(1)],
    ),
    "attention of many queries": lambda draw: (
        lambda q, k, v: sdpa(q, k, v, None, 0.25), attention(draw, TOKENS, KEYS, 1),
    ),
    "block of context parallelism": _block,
    "indexer": _indexed,
    "convolution": lambda draw: (
        partial(lambda place, x, w: short_convolution(x, w, place), draw.places()),
        [_rows_of(draw(TOKENS, D)), draw(D, 1, 4)],
    ),
    "recurrence": _rule,
    "decay of heads": partial(_gates, gate_rank=None),
    "decay of channels": partial(_gates, gate_rank=16),
    "loss": _loss,
    "sequence-wise balance": partial(_balance, which="sequence"),
    "global balance": partial(_balance, which="global"),
    "z-loss": partial(_balance, which="z"),
}  # fmt: skip


def _values(function: Callable[..., Any], leaves: list[Tensor]) -> list[Tensor]:
    found = function(*leaves)
    if isinstance(found, tuple):
        return list(found)
    if not found.requires_grad:
        return [found]
    drawn = Draw(found.device.type)
    upstream = drawn(*found.shape) if found.ndim else torch.ones_like(found)
    return [found, *torch.autograd.grad(found, leaves, upstream.to(found.dtype))]


def errors(case: Case) -> list[float]:
    """Relative errors of a case's results, then of the gradients of its arguments in order."""
    function, given = case
    narrow = _values(function, [x.clone().requires_grad_() for x in given])
    exact = _values(function, [x.double().requires_grad_() for x in given])
    pairs = zip(narrow, exact, strict=True)
    return [((x.double() - y.double()).norm() / y.double().norm()).item() for x, y in pairs]
