"""The router: scores, the selection of experts, their gating weights, and the routing bias."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from titan_moe.moe.balance import MARGIN_BINS, margins, quantile_bias, updated_bias
from titan_moe.moe.config import MoEConfig
from titan_moe.ops.linear import linear


class Scores(NamedTuple):
    """Router outputs for each token and expert, in at least float32."""

    logits_TE: Tensor
    scores_TE: Tensor
    """Scores by the model's function of the logits: `SCORES`."""
    shares_TE: Tensor
    """The scores normalised over experts, as the balance losses want them."""


def _softmax(logits_TE: Tensor) -> Scores:
    scores_TE = logits_TE.softmax(-1)
    return Scores(logits_TE, scores_TE, scores_TE)


def _sigmoid(logits_TE: Tensor) -> Scores:
    scores_TE = logits_TE.sigmoid()
    return Scores(logits_TE, scores_TE, scores_TE / scores_TE.sum(-1, keepdim=True))


def _sqrt_softplus(logits_TE: Tensor) -> Scores:
    scores_TE = F.softplus(logits_TE).sqrt()
    return Scores(logits_TE, scores_TE, scores_TE / scores_TE.sum(-1, keepdim=True))


SCORES: dict[str, Callable[[Tensor], Scores]] = {"softmax": _softmax, "sigmoid": _sigmoid}
SCORES["sqrtsoftplus"] = _sqrt_softplus
"""Score functions by the names that `MoEConfig.score` takes."""


class Router(nn.Module):
    """Scores tokens against experts; by the scores `select` picks top_k experts of each token, and
    `weigh` makes their gating weights.

    Forced, replayed and simulated routes take the place of `select`, and a printed model shows them
    there.

    Buffers: `expert_bias` [E] enters the selection but not the weights (arXiv 2408.15664);
    `previous_load` [E] holds each expert's share of the previous step's tokens; `tokens_per_expert`
    [E] counts this step's; `margins` [E, MARGIN_BINS] adds up `balance.margins`, for the quantile
    rule; `balance_loss` sums this step's auxiliary losses; `table` [rows, K] may name the experts
    of each token id.
    """

    expert_bias: Tensor
    previous_load: Tensor
    tokens_per_expert: Tensor
    margins: Tensor | None
    balance_loss: Tensor
    table: Tensor | None

    def __init__(self, dim: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.score = SCORES[config.score]
        self.gate = nn.Linear(dim, config.num_experts, bias=config.router_bias)
        self.scale: nn.Parameter | None = None
        if config.stream_eps is not None:
            self.scale = nn.Parameter(torch.empty(dim))
        self.select: nn.Module = BestExperts(config)
        table = torch.empty(config.table_rows, config.top_k, dtype=torch.int64)
        self.register_buffer("table", table if config.table_rows else None)
        if config.force_load_balance:
            self.select = GivenExperts("each in turn", partial(_in_turn, config))
        self.weigh = GatingWeights(config)
        num_experts = config.num_experts
        self.register_buffer("expert_bias", torch.empty(num_experts, dtype=torch.float32))
        self.register_buffer("previous_load", torch.empty(num_experts, dtype=torch.float32))
        self.register_buffer(
            "tokens_per_expert", torch.empty(num_experts, dtype=torch.int64), persistent=False
        )
        bins: Tensor | None = None
        if config.bias_update == "quantile":
            bins = torch.empty(num_experts, MARGIN_BINS, dtype=torch.int64)
        self.register_buffer("margins", bins, persistent=False)
        self.register_buffer("balance_loss", torch.empty((), dtype=torch.float64), persistent=False)
        self.init_buffers()

    def init_buffers(self) -> None:
        """Sets the buffers to their first values; also called after the meta device."""
        self.expert_bias.zero_()
        self.previous_load.fill_(1 / self.config.num_experts)
        self.tokens_per_expert.zero_()
        self.balance_loss.zero_()
        if self.margins is not None:
            self.margins.zero_()
        if self.table is not None:  # A new run's; published models have tables of their own.
            self.table.copy_(_in_turn(self.config, self.table))

    def forward(self, x_TD: Tensor) -> Scores:
        return self.score(self._logits(x_TD))

    def observe(self, scores_TE: Tensor, counted_T: Tensor | None) -> None:
        """Counts the margins of the counted tokens, all if None."""
        if self.margins is not None:
            top_k, scores_TE = self.config.top_k, scores_TE.detach()
            self.margins += margins(scores_TE, self.expert_bias, top_k, counted_T)

    def _logits(self, x_TD: Tensor) -> Tensor:
        dtype, weight_ED = torch.promote_types(x_TD.dtype, torch.float32), self.gate.weight
        if self.scale is not None:
            dim = x_TD.shape[1]
            x_TD = F.rms_norm(x_TD, (dim,), None, self.config.stream_eps) * self.scale * dim**-0.5
        if x_TD.is_cuda and x_TD.dtype == weight_ED.dtype == torch.bfloat16:
            logits_TE = _WideProduct.apply(x_TD, weight_ED)
            return logits_TE if self.gate.bias is None else logits_TE + self.gate.bias
        bias_E = None if self.gate.bias is None else self.gate.bias.to(dtype)
        return F.linear(x_TD.to(dtype), weight_ED.to(dtype), bias_E)


class BestExperts(nn.Module):
    """Selects the top_k experts of each token by score and bias, maybe of its best groups alone, or
    those that a table names for the token's id."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, scores_TE: Tensor, bias_E: Tensor, named_TK: Tensor | None = None) -> Tensor:
        """Returns experts_TK, best first. Has no gradient."""
        if named_TK is not None:
            return named_TK
        scores_TE = scores_TE.detach() + bias_E
        if self.config.num_groups > 1:
            scores_TE = _keep_top_groups(scores_TE, self.config)
        return scores_TE.topk(self.config.top_k, dim=-1).indices

    def extra_repr(self) -> str:
        return f"{self.config.top_k} of {self.config.num_experts}"


class GivenExperts(nn.Module):
    """Takes the place of `BestExperts`: scores have no say in where tokens go.

    Args:
        name: tells in a printed model where tokens go.
        choose: takes scores_TE, for their number and device, and returns experts_TK.
    """

    def __init__(self, name: str, choose: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.name, self.choose = name, choose

    def forward(self, scores_TE: Tensor, bias_E: Tensor, *_: object) -> Tensor:
        return self.choose(scores_TE)

    def extra_repr(self) -> str:
        return self.name


def _in_turn(config: MoEConfig, scores_TE: Tensor) -> Tensor:
    """Gives each expert one of every E choices. A token reaches about as many of K ranks as at
    random, 1 - 1/e of them: neighbours would be on one."""
    num_tokens, top_k, num_experts = len(scores_TE), config.top_k, config.num_experts
    steps = range(max(round(0.63 * num_experts / top_k), 1), num_experts + 2)
    step = next(each for each in steps if math.gcd(each, num_experts) == 1)
    choices = torch.arange(num_tokens * top_k, device=scores_TE.device)
    return (choices * step % num_experts).view(num_tokens, top_k)


class GatingWeights(nn.Module):
    """The weights of the selected experts: weights_TK of scores_TE and experts_TK."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.scale: nn.Parameter | None = None
        if config.stream_eps is not None:
            self.scale = nn.Parameter(torch.empty(config.num_experts))

    def forward(self, scores_TE: Tensor, experts_TK: Tensor) -> Tensor:
        weights_TK = _gather_selected(scores_TE, experts_TK)
        if self.config.normalize_top_k:
            # Sigmoid scores may all underflow; DeepSeek's reference adds as much.
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        if self.scale is not None:
            weights_TK = weights_TK * self.scale.to(weights_TK.dtype)[experts_TK]
        scale = self.config.route_scale
        return weights_TK if scale == 1 else weights_TK * scale


class _WideProduct(torch.autograd.Function):
    """x @ weight.T of bfloat16 values, in float32: each product is exact. The backward rounds the
    gradient of the logits, as it does its own results. CUDA alone; torch has no such gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        return torch.mm(x_TD, weight_ED.t(), out_dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TE: Tensor):  # type: ignore[override, no-untyped-def]
        x_TD, weight_ED = ctx.saved_tensors
        grad_TE = grad_TE.to(x_TD.dtype)
        return grad_TE @ weight_ED, grad_TE.t() @ x_TD


def _gather_selected(scores_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """Gathers, and writes in the backward instead of adding: a token's experts are distinct."""
    num_experts = scores_TE.shape[1]

    def scatter(grad_TK: Tensor, experts_TK: Tensor) -> Tensor:
        return grad_TK.new_zeros(len(grad_TK), num_experts).scatter_(1, experts_TK, grad_TK)

    return linear(scores_TE, lambda x_TE: x_TE.gather(1, experts_TK), scatter, experts_TK)


def _keep_top_groups(scores_TE: Tensor, config: MoEConfig) -> Tensor:
    """Scores of experts outside each token's best groups become -inf."""
    scores_TGE = scores_TE.unflatten(-1, (config.num_groups, -1))
    group_scores_TG = scores_TGE.topk(config.group_score_top, dim=-1).values.sum(-1)
    best_TG = group_scores_TG.topk(config.top_groups, dim=-1).indices
    eligible_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool).scatter_(-1, best_TG, True)
    return scores_TGE.masked_fill(~eligible_TG[..., None], float("-inf")).flatten(1)


def local_counts(
    routers: Mapping[str, Router],
    all_layers: Sequence[str],
    config: MoEConfig,
    device: torch.device,
) -> dict[str, Tensor]:
    """Returns what this rank's routers have counted since the last call, and sets their counters to
    0: counts_LE, tokens per expert, and for the quantile rule margins_LEB.

    A layer of `all_layers` that another rank holds has a row of zeros: the caller sums over the
    world.
    """
    counters = {"counts_LE": {name: each.tokens_per_expert for name, each in routers.items()}}
    nothing = {"counts_LE": torch.zeros(config.num_experts, dtype=torch.int64, device=device)}
    if config.bias_update == "quantile":
        own = {name: x for name, each in routers.items() if (x := each.margins) is not None}
        counters["margins_LEB"] = own
        nothing["margins_LEB"] = nothing["counts_LE"].new_zeros(config.num_experts, MARGIN_BINS)
    counts = {
        key: torch.stack([of_layer.get(name, nothing[key]) for name in all_layers])
        for key, of_layer in counters.items()
    }
    if routers:
        torch._foreach_zero_([x for of_layer in counters.values() for x in of_layer.values()])
    return counts


@torch.no_grad()
def update_routers(
    routers: Mapping[str, Router],
    all_layers: Sequence[str],
    counts_LE: Tensor,
    margins_LEB: Tensor | None = None,
) -> None:
    """Move each layer's routing bias towards an even load, and remember the load.

    Called before the optimizer step, once for all of its microbatches; a few launches, however many
    layers there are. `counts_LE` has a row for each of `all_layers`, of which this rank moves its
    own.
    """
    rows = [row for row, name in enumerate(all_layers) if name in routers]
    if not rows:
        return
    local = [routers[all_layers[row]] for row in rows]
    if len(rows) < len(all_layers):
        counts_LE = torch.stack([counts_LE[row] for row in rows])
        if margins_LEB is not None:
            margins_LEB = torch.stack([margins_LEB[row] for row in rows])
    loads, total_L1 = [router.previous_load for router in local], counts_LE.sum(-1, keepdim=True)
    # A layer that has counted no token keeps its load: prediction beyond short documents.
    loads_LE = (counts_LE / total_L1).where(total_L1 > 0, torch.stack(loads))
    torch._foreach_copy_(loads, list(loads_LE.to(loads[0].dtype).unbind()))
    # The bias of a frozen router stays as it is, and a table has no use for one.
    moves = [n for n, router in enumerate(local) if router.gate.weight.requires_grad]
    moves = [n for n in moves if local[n].table is None]
    config = local[0].config
    if moves and (config.bias_update_speed or margins_LEB is not None):
        biases = [router.expert_bias for router in local]
        bias_LE = torch.stack(biases)
        if margins_LEB is not None:
            moved_LE = quantile_bias(bias_LE, margins_LEB, config.top_k, config.bias_momentum)
            moved_LE = moved_LE.where(total_L1 > 0, bias_LE)
        else:
            moved_LE = updated_bias(bias_LE, counts_LE, config.bias_update_speed)
        moved = moved_LE.unbind()
        torch._foreach_copy_([biases[n] for n in moves], [moved[n] for n in moves])
