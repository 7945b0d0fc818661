"""Hooks of the work between an MoE layer's modules: choice, weights, dispatch, experts, combine."""

import math
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from titan_moe.distributed.parallelize import ShardedModel
from titan_moe.moe.dispatch.base import Dispatcher, ExpertRows
from titan_moe.moe.layer import MoE
from titan_moe.moe.router import Router
from titan_moe.verify.localize.capture.records import EXPERT_SUMS, EXPERTS, TOKENS, Place
from titan_moe.verify.localize.capture.sketch import sketch_rows
from titan_moe.verify.localize.capture.watcher import Watcher, on_gradient, recomputing


def choice_margins(scores_TE: Tensor, router: Router) -> Tensor:
    """Returns the distance of each token's scores from another choice, [T]: the lead of the last
    expert that is chosen over the first that is not, or of the last group over the next where that
    is less."""
    config, biased_TE = router.config, scores_TE.double() + router.expert_bias
    margin_T = biased_TE.new_full((len(biased_TE),), torch.inf)
    if config.num_groups > 1 and config.top_groups < config.num_groups:
        by_group = biased_TE.unflatten(-1, (config.num_groups, -1))
        strength_TG = by_group.topk(config.group_score_top, dim=-1).values.sum(-1)
        ranked = strength_TG.sort(-1, descending=True)
        margin_T = ranked.values[:, config.top_groups - 1] - ranked.values[:, config.top_groups]
        out_TG = ranked.indices[:, config.top_groups :, None].expand(-1, -1, by_group.shape[-1])
        biased_TE = by_group.scatter(1, out_TG, -torch.inf).flatten(1)
    if config.top_k < biased_TE.shape[1]:
        ranked_TE = biased_TE.sort(-1, descending=True).values
        lead_T = ranked_TE[:, config.top_k - 1] - ranked_TE[:, config.top_k]
        margin_T = torch.minimum(margin_T, lead_T)
    return margin_T


class MoEHooks:
    """Record the experts that each token of a layer chose, their weights, and each expert's rows.

    Rows have forgotten their tokens where experts see them, so they are summed by expert.
    """

    def __init__(self, name: str, moe: MoE, watcher: Watcher, sharded: ShardedModel) -> None:
        self._name, self._moe, self.watcher = name, moe, watcher
        dims, rank = sharded.meshes.dims, sharded.meshes.rank
        self._rank, self._slices = rank, dims.etp
        self._chunks = count()  # Rows of one expert on one rank, in several microbatches, add up.
        self._first = dims.coordinate(rank, "ep") * moe.config.num_experts // dims.ep

    def install(self) -> list[RemovableHandle]:
        """See the layer while the watcher is active."""
        moe, watched = self._moe, self.watcher.watched
        moe.routing_fn = watched(moe.routing_fn, self._choosing(moe.routing_fn))
        moe.gating_weights = watched(moe.gating_weights, self._weighing(moe.gating_weights))
        moe.dispatcher = _WatchedDispatcher(moe.dispatcher, self)
        return [
            moe.experts.register_forward_pre_hook(self._before_experts),
            moe.experts.register_forward_hook(self._after_experts),
        ]

    def _choosing(self, choose: Callable[..., Tensor]) -> Callable[..., Tensor]:
        place = Place("forward", f"{self._name}.router", "choice")

        def chosen(scores_TE: Tensor) -> Tensor:
            self.watcher.order(place)  # Before what is called in it: a routing trace weighs, too.
            experts_TK = choose(scores_TE)
            if not recomputing():
                self._keep_choice(place, scores_TE.detach(), experts_TK)
            return experts_TK

        return chosen

    @torch.no_grad()
    def _keep_choice(self, place: Place, scores_TE: Tensor, experts_TK: Tensor) -> None:
        watcher = self.watcher
        assert watcher.now is not None
        with _disable_current_modes():
            hot_TE = torch.zeros_like(scores_TE).scatter_(1, experts_TK, 1)
            watcher.records.add(
                place,
                TOKENS,
                watcher.order(place),
                keys=watcher.now.own_keys,
                part=0,
                values=sketch_rows(hot_TE),
                experts=experts_TK.sort(1).values,
                margins=choice_margins(scores_TE, self._moe.router),
            )

    def _weighing(self, weigh: Callable[..., Tensor]) -> Callable[..., Tensor]:
        name, watcher = f"{self._name}.router.weigh", self.watcher

        def weighed(scores_TE: Tensor, experts_TK: Tensor) -> Tensor:
            weights_TK = weigh(watcher.given(name, "scores", scores_TE), experts_TK)
            self._chosen = experts_TK
            watcher.forward(name, "weights", self._by_expert(weights_TK, experts_TK))
            return weights_TK

        return weighed

    def _by_expert(self, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """A column for each expert, so that the order of a token's experts does not matter."""
        size = len(weights_TK), self._moe.config.num_experts
        with torch.no_grad(), _disable_current_modes():
            return weights_TK.new_zeros(size).scatter_(1, experts_TK, weights_TK.detach())

    def sending(self, send: Callable[..., Any]) -> Callable[..., Any]:
        name, watcher = f"{self._name}.dispatcher.dispatch", self.watcher

        def sent(x_TD: Tensor, weights_TK: Tensor, plan: Any) -> Any:
            x_TD = watcher.given(name, "tokens", x_TD)
            if weights_TK.requires_grad:
                weights_TK = weights_TK.view_as(weights_TK)
                self._weights_backward(name, weights_TK)
            return send(x_TD, weights_TK, plan)

        return sent

    def receiving(self, receive: Callable[..., ExpertRows]) -> Callable[..., ExpertRows]:
        name = f"{self._name}.dispatcher.dispatch"

        def received(sent: Any, plan: Any) -> ExpertRows:
            rows = receive(sent, plan)
            self._forward(name, "rows", rows.x_RD, rows, whole=True)
            self._forward(name, "weights", rows.weights_R[:, None], rows, whole=True)
            return rows

        return received

    def _weights_backward(self, name: str, weights_TK: Tensor) -> None:
        if recomputing():
            return
        place, now, experts_TK = Place("backward", name, "weights"), self.watcher.now, self._chosen
        assert now is not None
        self.watcher.order(place)

        def keep(grad_TK: Tensor) -> None:
            x_TE = self._by_expert(grad_TK, experts_TK)
            self.watcher.keep(place, now, x_TE, cut=False, gradient=True)

        on_gradient(weights_TK, keep)

    def combining(self, combine: Callable[..., Tensor]) -> Callable[..., Tensor]:
        name, watcher = f"{self._name}.dispatcher.combine", self.watcher

        def combined(y_RD: Tensor, plan: Any) -> Tensor:
            if y_RD.requires_grad:
                y_RD = y_RD.view_as(y_RD)
                self._backward(name, "rows", y_RD, self._rows, whole=True)
            y_TD = combine(y_RD, plan)
            watcher.forward(name, "output", y_TD)
            return y_TD

        return combined

    def _before_experts(self, module: Any, args: tuple[ExpertRows]) -> tuple[ExpertRows]:
        (rows,) = args
        name = f"{self._name}.experts"
        seen = {}
        for field, tensor in (("x_RD", "input"), ("weights_R", "weights")):
            x = seen[field] = getattr(rows, field)
            if x.requires_grad:
                x = seen[field] = x.view_as(x)
                self._backward(name, tensor, x, rows, whole=False)
        self._rows = rows
        return (rows._replace(**seen),)

    def _after_experts(self, module: Any, args: tuple[ExpertRows], y_RD: Tensor) -> None:
        self._forward(f"{self._name}.experts", "output", y_RD, args[0], whole=False)

    def _forward(
        self, name: str, tensor: str, x_RF: Tensor, rows: ExpertRows, *, whole: bool
    ) -> None:
        if (phase := self.watcher.phase) is not None:
            self._keep(Place(phase, name, tensor), x_RF, rows, whole=whole)

    def _backward(
        self, name: str, tensor: str, x_R: Tensor, rows: ExpertRows, *, whole: bool
    ) -> None:
        if recomputing():
            return
        place = Place("backward", name, tensor)
        self.watcher.order(place)
        on_gradient(x_R, lambda grad: self._keep(place, grad, rows, whole=whole))

    @torch.no_grad()
    def _keep(self, place: Place, x_R: Tensor, rows: ExpertRows, *, whole: bool) -> None:
        """Sum the rows of each expert.

        Args:
            whole: each slice of an expert has the same rows; else they have parts of a sum.
        """
        with _disable_current_modes():
            x_RF = x_R.detach().view(len(x_R), math.prod(x_R.shape[1:]))  # No -1: maybe no rows.
            row_R = torch.arange(len(x_RF), device=x_RF.device)
            expert_R = torch.searchsorted(rows.offsets_E, row_R, right=True)
            # Padding has no token, and rows past the last expert's were never written.
            mine_R = (expert_R < len(rows.offsets_E)) & (rows.weights_R.detach() != 0)
            sketches = sketch_rows(x_RF[mine_R])
            sums = sketches.new_zeros(len(rows.offsets_E), sketches.shape[1])
            sums.index_add_(0, expert_R[mine_R], sketches)
            experts = torch.arange(self._first, self._first + len(sums))
            watcher = self.watcher
            watcher.records.add(
                place,
                EXPERTS if whole or self._slices == 1 else EXPERT_SUMS,
                watcher.order(place),
                keys=torch.stack([experts, torch.zeros_like(experts)], 1),
                part=self._rank << 32 | next(self._chunks),
                values=sums / self._slices if whole else sums,
            )


class _WatchedDispatcher(Dispatcher):
    """Another dispatcher, of which a layer's hooks see what is sent, received and combined."""

    def __init__(self, plain: Dispatcher, hooks: MoEHooks) -> None:
        self._plain = plain
        watched = hooks.watcher.watched
        self._send = watched(plain.send, hooks.sending(plain.send))
        self._receive = watched(plain.receive, hooks.receiving(plain.receive))
        self._combine = watched(plain.combine, hooks.combining(plain.combine))

    def traffic(self, experts_TK: Tensor, counts_E: Tensor) -> Tensor:
        return self._plain.traffic(experts_TK, counts_E)

    def plan(self, experts_TK: Tensor, counts_E: Tensor) -> Any:
        return self._plain.plan(experts_TK, counts_E)

    def send(self, x_TD: Tensor, weights_TK: Tensor, plan: Any) -> Any:
        return self._send(x_TD, weights_TK, plan)

    def receive(self, sent: Any, plan: Any) -> ExpertRows:
        return self._receive(sent, plan)

    def combine(self, y_RD: Tensor, plan: Any) -> Tensor:
        return self._combine(y_RD, plan)

    def dropped(self, plan: Any) -> Tensor | None:
        return self._plain.dropped(plan)
