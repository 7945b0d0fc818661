"""The MoE layer against a loop over tokens and experts."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.gated_cases import ACTIVATIONS, plain
from titan_moe.comm.collectives import AllToAll, InFlight
from titan_moe.distributed.compile import _compile_pieces
from titan_moe.models.feed_forward import FeedForward
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.decisions import DecisionMemo
from titan_moe.moe.dispatch.base import Dispatcher, ExpertRows, Route
from titan_moe.moe.layer import Experts, MoE
from titan_moe.ops.activation import CLAMPED_SWIGLU
from titan_moe.ops.grouped_mm import grouped_mm
from titan_moe.verify.gradients.poison import Poison

CONFIG = MoEConfig(6, top_k=2, hidden_dim=8, normalize_top_k=True, route_scale=2.5)
DIM = 16


def _layer(config: MoEConfig, dtype: torch.dtype = torch.float64) -> MoE:
    torch.manual_seed(1)
    layer = MoE(DIM, config, FeedForward(DIM, 8)).to(dtype)
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.5)
    return layer


def slow_moe(layer: MoE, x_BSD: Tensor) -> Tensor:
    """Computes the layer token by token."""
    outputs = []
    experts = layer.experts
    for x in x_BSD.flatten(0, 1):
        scores = layer.router.gate(x).softmax(-1)
        chosen = (scores + layer.router.expert_bias).topk(layer.config.top_k).indices
        weights = scores[chosen] / scores[chosen].sum() * layer.config.route_scale
        latent = layer.config.latent_dim is not None
        row, routed = layer.to_experts.weight @ x if latent else x, 0
        for weight, e in zip(weights, chosen.tolist(), strict=True):
            if layer.config.weights_scale == "inputs":
                routed = routed + slow_expert(experts, e, weight * row)
            else:
                routed = routed + weight * slow_expert(experts, e, row)
        y = layer.from_experts.weight @ routed if latent else routed
        outputs.append(layer.shared_experts(x) + y)
    return torch.stack(outputs).view_as(x_BSD)


def slow_expert(experts: Experts, e: int, x: Tensor) -> Tensor:
    (name,) = (n for n, each in ACTIVATIONS.items() if each == experts.compute.activation)
    firsts = [(experts.w1, experts.b1), (experts.w3, experts.b3)][: 1 + ACTIVATIONS[name].gated]
    gate_up = [w[e] @ x + (0 if b is None else b[e]) for w, b in firsts]
    return experts.w2[e] @ plain(name, *gate_up) + (0 if experts.b2 is None else experts.b2[e])


def _grads(
    layer: MoE, x_BSD: Tensor, output: Tensor, loss: Tensor | float = 0.0, *, keep: bool = False
) -> dict[str, Tensor]:
    layer.zero_grad()
    x_BSD.grad = None
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    ((output * weights).sum() + loss).backward(retain_graph=keep)
    grads = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    return grads | {"x": x_BSD.grad.clone()}


BIASED = replace(CONFIG, router_bias=True, projection_bias=True, activation=CLAMPED_SWIGLU)
UNGATED = replace(CONFIG, activation=ACTIVATIONS["Nemotron 3"])
KINDS = {
    "plain": CONFIG,
    "latent": replace(CONFIG, latent_dim=12),
    "weighted inputs": replace(CONFIG, weights_scale="inputs"),
    "biases": BIASED,
    "biases, weighted inputs": replace(BIASED, weights_scale="inputs"),
    "not gated": UNGATED,
    "not gated, weighted inputs": replace(UNGATED, weights_scale="inputs"),
    "not gated, biases": replace(UNGATED, projection_bias=True),
    "clamped after": replace(CONFIG, activation=ACTIVATIONS["Step-3.7"]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row_alignment", [1, 8, 16, 32, 128])
def test_layer_matches_the_loop_forward_and_backward_and_in_a_second_backward(
    row_alignment: int, kind: str
):
    layer = _layer(replace(KINDS[kind], row_alignment=row_alignment))
    if layer.experts.compute.activation.limit is not None:
        layer.experts.w1.data.mul_(6)  # Some are clamped.
    x_BSD = torch.randn(2, 7, DIM, dtype=torch.float64, requires_grad=True)
    layer.router.expert_bias[2] = -100.0  # Expert 2 gets no token.
    output, expected = layer(x_BSD), slow_moe(layer, x_BSD)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-13)
    ours, theirs = _grads(layer, x_BSD, output, keep=True), _grads(layer, x_BSD, expected)
    again = _grads(layer, x_BSD, output)  # A split backward comes by twice.
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    assert all(torch.equal(grad, again[name]) for name, grad in ours.items())
    assert not ours["experts.w1"][2].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_past_the_last_group_never_reach_a_token_or_a_weight(dtype: torch.dtype, kind: str):
    layer = _layer(replace(KINDS[kind], row_alignment=16), dtype)
    x_BSD = torch.randn(2, 7, DIM, dtype=dtype, requires_grad=True)
    clean = layer(x_BSD)
    clean_grads = _grads(layer, x_BSD, clean)
    poison = Poison([layer], "cpu")
    output = layer(x_BSD)
    assert poison.tails and poison.paddings
    assert torch.equal(output, clean)
    for name, grad in _grads(layer, x_BSD, output).items():
        assert torch.equal(grad, clean_grads[name]), name


@pytest.mark.parametrize(
    "kind, other_product",
    [("plain", True), ("biases", False), ("not gated, weighted inputs", False)],
)
def test_compiled_pieces_have_the_same_gradients(kind: str, other_product: bool):
    layer = _layer(KINDS[kind])
    if other_product:
        layer.experts.compute.multiply = lambda *operands: grouped_mm(*operands)
    x_BSD = torch.randn(2, 7, DIM, dtype=torch.float64, requires_grad=True)
    expected = _grads(layer, x_BSD, layer(x_BSD))
    _compile_pieces(layer, {"backend": "aot_eager"})
    torch.testing.assert_close(_grads(layer, x_BSD, layer(x_BSD)), expected)


def test_auxiliary_losses_are_those_written_out_with_ordinary_autograd():
    weights = {"sequence_aux_loss_weight": 0.1, "global_aux_loss_weight": 0.2, "z_loss_weight": 0.3}
    layer = _layer(replace(CONFIG, **weights))
    layer.router.previous_load.copy_(torch.tensor([0.3, 0.1, 0.1, 0.2, 0.2, 0.1]))
    x_BSD = torch.randn(2, 7, DIM, dtype=torch.float64, requires_grad=True)
    ours = _grads(layer, x_BSD, layer(x_BSD))

    output = slow_moe(layer, x_BSD)
    logits = x_BSD @ layer.router.gate.weight.T
    scores = logits.softmax(-1)
    loss = 0.3 * logits.logsumexp(-1).square().sum()
    loss = loss + 0.2 * 6 * (scores * layer.router.previous_load).sum()
    chosen = F.one_hot(scores.topk(2).indices, 6).sum((1, 2)).double()
    frequency_BE = chosen * 6 / (2 * 7)
    loss = loss + 0.1 * (frequency_BE * scores.mean(1) * 7).sum()
    torch.testing.assert_close(layer.router.balance_loss, loss.detach())
    torch.testing.assert_close(ours, _grads(layer, x_BSD, output, loss))


def test_a_recomputation_repeats_the_decision_of_its_own_forward():
    memo = DecisionMemo()
    contexts = [memo.contexts() for _ in range(2)]  # Two microbatches, as in a pipeline.
    decisions = []
    for record, _ in contexts:
        with record:
            decisions.append(memo.decide(lambda given: object(), None))
    for decision, (_, replay) in zip(decisions, contexts, strict=True):
        with replay:
            assert memo.decide(lambda given: object(), None) is decision
    assert memo.decide(lambda given: object(), None) not in decisions


class _Exchange(Dispatcher):
    """Hands over copies of the received rows, as one that orders them by expert does."""

    def send(self, x_TD: Tensor, weights_TK: Tensor, route: Route) -> Any:
        rows = super().send(x_TD, weights_TK, route)
        self.received = weakref.ref(rows.x_RD)
        here = AllToAll([len(rows.x_RD)], [len(rows.x_RD)], None)
        return InFlight(rows.x_RD, here), rows._replace(x_RD=None)

    def receive(self, sent: Any, route: Route) -> ExpertRows:
        handle, rows = sent
        return rows._replace(x_RD=handle.wait().clone())

    def send_home(self, y_RD: Tensor, route: Route) -> Tensor:
        assert self.received() is None
        return super().send_home(y_RD, route)


def test_received_rows_are_freed_before_outputs_are_sent_back() -> None:
    layer = _layer(CONFIG)
    layer.dispatcher = _Exchange(CONFIG.row_alignment)
    layer(torch.randn(1, 8, DIM, dtype=torch.float64))
