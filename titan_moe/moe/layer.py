"""The mixture-of-experts layer."""

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from titan_moe.moe import balance
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.decisions import DecisionMemo
from titan_moe.moe.dispatch.base import Dispatcher, LocalDispatcher
from titan_moe.moe.experts import Chunk, Experts
from titan_moe.moe.router import Router, Scores
from titan_moe.ops.permute_indices import count_experts
from titan_moe.runtime.regions import region


class Choice(NamedTuple):
    """The selected experts, and how their rows begin to travel."""

    experts_TK: Tensor
    chosen_BE: Tensor | None
    """Choices of each expert by sequence; None if no loss needs them."""
    drafts: list[Any]
    """Results of `Dispatcher.start_counts`, one for each chunk of the tokens."""


class MoE(nn.Module):
    """Routed experts, plus a shared expert that sees every token.

    `dispatcher` is a strategy, which expert parallelism sets. `memo` replays routing in a
    recomputation. `to_experts` and `from_experts` pass on the tokens that the dispatcher is given
    and the sums that it returns: places for hooks. `sequence_group` are the ranks that hold parts
    of the same sequences, None: this one alone.

    `counts_traffic` says whether this step's traffic is measured, which only a log reads; where a
    graph holds the whole layer it is measured always.

    Buffers: `rows_sent` [2] sums the dispatcher's traffic of this step's tokens; `rows_dropped` []
    the (token, expert) choices that exceeded the capacity, in training or in validation.
    """

    rows_sent: Tensor
    rows_dropped: Tensor

    def __init__(self, dim: int, config: MoEConfig, shared_experts: nn.Module | None) -> None:
        super().__init__()
        self.config = config
        self.router = Router(dim, config)
        self.experts = Experts(dim, config)
        self.shared_experts = shared_experts
        self.dispatcher: Dispatcher = LocalDispatcher(config.row_alignment)
        self.sequence_group: ProcessGroup | None = None
        self.to_experts, self.from_experts = nn.Identity(), nn.Identity()
        self.memo = DecisionMemo()
        self.counts_traffic = True
        self.register_buffer("rows_sent", torch.empty(2, dtype=torch.int64), persistent=False)
        self.register_buffer("rows_dropped", torch.empty((), dtype=torch.int64), persistent=False)
        self.init_buffers()

    def init_buffers(self) -> None:
        """Values of a run that begins; also called after the module leaves the meta device."""
        self.rows_sent.zero_()
        self.rows_dropped.zero_()

    def forward(self, x_BSD: Tensor, counted_BS: Tensor | None = None) -> Tensor:
        """Returns the layer's output, [B, S, D]. `counted_BS` is False for tokens that counts, and
        so routing biases, and balance losses leave out; None: all tokens count."""
        x_TD = x_BSD.flatten(0, 1)
        with region("route"):
            scores = self.router(x_TD)
        scores_BSE = scores.scores_TE.unflatten(0, x_BSD.shape[:2])
        choice = self.memo.decide(partial(self.choose, counted_BS=counted_BS), scores_BSE)
        with region("route"):
            weights_TK = self.router.weigh(scores.scores_TE, choice.experts_TK)
        if self.training:
            loss = self._balance_loss(scores, choice.chosen_BE, x_BSD.shape[0], counted_BS)
            if loss is not None:
                weights_TK = balance.attach_loss(weights_TK, loss, self.router.balance_loss)

        with region("dispatch"):
            routed_TD = self.to_experts(x_TD)
            chunks = zip(
                self._chunks(routed_TD), self._chunks(weights_TK), choice.drafts, strict=True
            )
            sent = [self._send(*chunk) for chunk in chunks]
        # While rows travel, here and in the backward.
        shared_TD = None
        if self.shared_experts is not None:
            with region("shared_experts"):
                shared_TD = self.shared_experts(x_TD)
        with region("dispatch"):
            orders = [self.memo.decide(self.dispatcher.order, plan) for _, plan in sent]
        home = self.experts(
            self.dispatcher,
            [Chunk(*chunk, order) for chunk, order in zip(sent, orders, strict=True)],
        )
        with region("combine"):
            pairs = zip(home, choice.drafts, strict=True)
            sums = [self.dispatcher.add_up(*pair) for pair in pairs]
            y_TD = self.from_experts(sums[0] if len(sums) == 1 else torch.cat(sums))
        return (y_TD if shared_TD is None else y_TD + shared_TD).view_as(x_BSD)

    def _send(self, x_TD: Tensor, weights_TK: Tensor, draft: Any) -> tuple[Any, Any]:
        """Returns a chunk's rows on their way, and its plan."""
        gathered = self.dispatcher.gather(x_TD, weights_TK, draft)  # While counts travel.
        plan = self.memo.decide(self.sizes, draft)
        return self.dispatcher.send(gathered, plan), plan

    def _chunks(self, x_T: Tensor) -> tuple[Tensor, ...]:
        """Tensors of the tokens, [T, ...], by chunk; a token or more in each."""
        chunks = self.dispatcher.num_chunks
        return (x_T,) if chunks == 1 else x_T.tensor_split(chunks)

    def choose(self, scores_BSE: Tensor, counted_BS: Tensor | None = None) -> Choice:
        """Selects experts, counts them (in training), and starts the exchange of counts."""
        with region("route"):
            experts_TK = self.router.select(scores_BSE.flatten(0, 1), self.router.expert_bias)
        chunks = [
            (chunk_TK, count_experts(chunk_TK, self.config.num_experts))
            for chunk_TK in self._chunks(experts_TK)
        ]
        with region("dispatch"):  # First: what it sends is under way.
            drafts = [self.dispatcher.start_counts(*chunk) for chunk in chunks]
        chosen_BE = None
        if self.training:
            for chunk_TK, counts_E in chunks:
                if counted_BS is None:
                    self.router.tokens_per_expert += counts_E
                if self.counts_traffic:
                    self.rows_sent += self.dispatcher.traffic(chunk_TK, counts_E)
            if self.config.sequence_aux_loss_weight or counted_BS is not None:
                experts_BSK = experts_TK.view(*scores_BSE.shape[:2], -1)
                chosen_BE = self._counts_per_sequence(experts_BSK, counted_BS)
        return Choice(experts_TK, chosen_BE, drafts)

    def sizes(self, draft: Any) -> Any:
        """Returns the plan of a chunk's exchanges; waits for the counts of other ranks."""
        plan = self.dispatcher.sizes(draft)
        if plan.dropped is not None:
            self.rows_dropped += plan.dropped
        return plan

    def _counts_per_sequence(self, experts_BSK: Tensor, counted_BS: Tensor | None) -> Tensor:
        """Returns the choices of each expert by sequence, chosen_BE; of whole sequences if a loss
        needs them. Adds this rank's to `tokens_per_expert` where not all tokens count."""
        num_experts = self.config.num_experts
        if counted_BS is not None:  # A number beyond the experts' is counted nowhere.
            experts_BSK = experts_BSK.masked_fill(~counted_BS[..., None], num_experts)
        chosen_BE = balance.counts_per_sequence(experts_BSK.flatten(1), num_experts)
        if counted_BS is not None:
            self.router.tokens_per_expert += chosen_BE.sum(0)
        if self.config.sequence_aux_loss_weight and self.sequence_group is not None:
            dist.all_reduce(chosen_BE, group=self.sequence_group)
        return chosen_BE

    def _balance_loss(
        self, scores: Scores, chosen_BE: Tensor | None, batch: int, counted_BS: Tensor | None
    ) -> Tensor | None:
        config, terms = self.config, []
        shares_BSE = scores.shares_TE.unflatten(0, (batch, -1))
        if counted_BS is not None:
            shares_BSE = shares_BSE * counted_BS[..., None]
        if config.sequence_aux_loss_weight:
            assert chosen_BE is not None
            loss = balance.sequence_loss(shares_BSE, chosen_BE)
            terms.append(config.sequence_aux_loss_weight * loss)
        if config.global_aux_loss_weight:
            loss = balance.global_loss(shares_BSE, self.router.previous_load)
            terms.append(config.global_aux_loss_weight * loss)
        if config.z_loss_weight:
            terms.append(config.z_loss_weight * balance.z_loss(scores.logits_TE, counted_BS))
        return sum(terms[1:], terms[0]) if terms else None


def take_dropped(moe_layers: Iterable[MoE], device: torch.device) -> Tensor:
    """Returns the number of rows that the layers have dropped since the last call, [] int64."""
    dropped = [moe.rows_dropped for moe in moe_layers]
    if not dropped:
        return torch.zeros((), dtype=torch.int64, device=device)
    total = torch.stack(dropped).sum()
    torch._foreach_zero_(dropped)
    return total
