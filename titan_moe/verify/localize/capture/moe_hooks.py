"""Hooks of the work between an MoE layer's modules: choice, weights, dispatch, experts, combine."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_moe.distributed.collectives import recomputing
from titan_moe.distributed.parallelize import ShardedModel
from titan_moe.moe.dispatch.base import Dispatcher, ExpertRows
from titan_moe.moe.layer import MoE
from titan_moe.moe.router import Router
from titan_moe.verify.localize.capture.records import EXPERTS, Sketches
from titan_moe.verify.localize.capture.sketch import sketch_rows
from titan_moe.verify.localize.capture.watcher import Lay, Watcher


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


class PartDraft(NamedTuple):
    """The draft of one of the parts in which a microbatch's tokens travel."""

    draft: Any
    """The draft that the watched dispatcher made."""
    part: tuple[int, int]
    """The part's number, and the number of parts."""


class MoEHooks(Dispatcher):
    """Record the experts that each token of a layer chose, their weights, and each expert's rows.

    Rows have forgotten their tokens where experts see them, so they are summed by expert. It takes
    the place of the layer's dispatcher, and passes calls on.
    """

    def __init__(self, name: str, moe: MoE, watcher: Watcher, sharded: ShardedModel) -> None:
        self._name, self._moe, self._watcher = name, moe, watcher
        self._plain, self.num_parts = moe.dispatcher, moe.dispatcher.num_parts
        dims, rank = sharded.meshes.dims, sharded.meshes.rank
        self._rank, self._slices = rank, dims.etp
        self._chunks = count()  # Rows of one expert on one rank, in several microbatches, add up.
        self._drafted = count()
        self._first = dims.coordinate(rank, "ep") * moe.config.num_experts // dims.ep

    def install(self, stack: ExitStack) -> None:
        """Watches the layer until the stack is closed."""
        moe = self._moe
        plain = moe.routing_fn, moe.gating_weights, moe.dispatcher
        moe.routing_fn, moe.gating_weights = self._choosing(plain[0]), self._weighing(plain[1])
        moe.dispatcher = self

        def end() -> None:
            moe.routing_fn, moe.gating_weights, moe.dispatcher = plain

        stack.callback(end)

    def traffic(self, experts_TK: Tensor, counts_E: Tensor) -> Tensor:
        return self._plain.traffic(experts_TK, counts_E)

    def start_counts(self, experts_TK: Tensor, counts_E: Tensor) -> PartDraft:
        draft = self._plain.start_counts(experts_TK, counts_E)
        return PartDraft(draft, (next(self._drafted) % self.num_parts, self.num_parts))

    def gather(self, x_TD: Tensor, weights_TK: Tensor, draft: PartDraft) -> Any:
        name, given = f"{self._name}.dispatcher.dispatch", self._watcher.given
        x_TD = given(name, "tokens", x_TD, self._watcher.by_token(part=draft.part))
        weights_TK = given(name, "weights", weights_TK, self._by_expert(draft.part))
        return self._plain.gather(x_TD, weights_TK, draft.draft)

    def sizes(self, draft: PartDraft) -> Any:
        return self._plain.sizes(draft.draft)

    def send(self, gathered: Any, plan: Any) -> Any:
        return self._plain.send(gathered, plan)

    def order(self, plan: Any) -> Any:
        return self._plain.order(plan)

    def receive(self, sent: Any, plan: Any, order: Any) -> ExpertRows:
        """Watches what dispatch made, which is what the experts are given."""
        name, rows = f"{self._name}.dispatcher.dispatch", self._plain.receive(sent, plan, order)
        lay, given = self._by_row(rows, whole=True), self._watcher.given
        self._watcher.forward(name, "rows", rows.x_RD, lay)
        self._watcher.forward(name, "weights", rows.weights_R, lay)
        self._rows, name, lay = rows, f"{self._name}.experts", self._by_row(rows, whole=False)
        x_RD = given(name, "input", rows.x_RD, lay)
        weights_R = given(name, "weights", rows.weights_R, lay)
        return rows._replace(x_RD=x_RD, weights_R=weights_R)

    def send_home(self, y_RD: Tensor, plan: Any, order: Any) -> Any:
        """Watches what the experts made, which is what is sent home."""
        if not recomputing():  # A recomputation ends before the last output.
            lay = self._by_row(self._rows, whole=False)
            self._watcher.forward(f"{self._name}.experts", "output", y_RD, lay)
        name, lay = f"{self._name}.dispatcher.combine", self._by_row(self._rows, whole=True)
        y_RD = self._watcher.given(name, "rows", y_RD, lay)
        return self._plain.send_home(y_RD, plan, order)

    def add_up(self, home: Any, draft: PartDraft) -> Tensor:
        y_TD, name = self._plain.add_up(home, draft.draft), f"{self._name}.dispatcher.combine"
        self._watcher.forward(name, "output", y_TD, self._watcher.by_token(part=draft.part))
        return y_TD

    def _choosing(self, choose: Callable[..., Tensor]) -> Callable[..., Tensor]:
        watcher, name = self._watcher, f"{self._name}.router"

        def chosen(scores_TE: Tensor) -> Tensor:
            experts_TK = choose(scores_TE)

            def choice(scores_TE: Tensor) -> Tensor:
                return torch.zeros_like(scores_TE).scatter_(1, experts_TK, 1)

            def margin(scores_TE: Tensor) -> Tensor:
                return choice_margins(scores_TE, self._moe.router)[:, None]

            watcher.forward(name, "choice", scores_TE, watcher.by_token(choice))
            watcher.forward(name, "margin", scores_TE, watcher.by_token(margin))
            return experts_TK

        return chosen

    def _weighing(self, weigh: Callable[..., Tensor]) -> Callable[..., Tensor]:
        name, watcher = f"{self._name}.router.weigh", self._watcher

        def weighed(scores_TE: Tensor, experts_TK: Tensor) -> Tensor:
            def by_expert(part: tuple[int, int]) -> Lay:
                """Sketches each token's weights in the order of its experts' numbers."""
                number, parts = part
                order_TK = experts_TK.tensor_split(parts)[number].argsort(1)
                return watcher.by_token(lambda x_TK: x_TK.gather(1, order_TK), part=part)

            scores_TE = watcher.given(name, "scores", scores_TE, watcher.by_token())
            weights_TK = weigh(scores_TE, experts_TK)
            self._by_expert = by_expert
            watcher.forward(name, "weights", weights_TK, by_expert((0, 1)))
            return weights_TK

        return weighed

    def _by_row(self, rows: ExpertRows, *, whole: bool) -> Lay:
        """Returns the sketch of tensors by row: the sum over the rows of each expert.

        Args:
            whole: each slice of an expert has the same rows; else they have parts of a sum.
        """

        def lay(x_R: Tensor, *, gradient: bool) -> Sketches:
            x_RF = x_R.view(len(x_R), math.prod(x_R.shape[1:]))  # No -1: maybe no rows.
            row_R = torch.arange(len(x_RF), device=x_RF.device)
            expert_R = torch.searchsorted(rows.offsets_E, row_R, right=True)
            # Padding has no token, and rows past the last expert's were never written.
            mine_R = (expert_R < len(rows.offsets_E)) & (rows.weights_R.detach() != 0)
            sketches = sketch_rows(x_RF[mine_R])
            sums = sketches.new_zeros(len(rows.offsets_E), sketches.shape[1])
            sums.index_add_(0, expert_R[mine_R], sketches)
            experts_E = torch.arange(self._first, self._first + len(sums))
            values = sums / self._slices if whole else sums
            return Sketches(EXPERTS, experts_E, values, self._rank << 32 | next(self._chunks))

        return lay
