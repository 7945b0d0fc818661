"""The mixture-of-experts layer: a token's way to its experts and back, whose moves are those of
`moe/dispatch/`."""

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from titan_moe.comm.collectives import recomputing
from titan_moe.moe import balance
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.decisions import DecisionMemo
from titan_moe.moe.dispatch.base import Dispatcher, Route
from titan_moe.moe.experts import ExpertAdapter, ExpertOutputs
from titan_moe.moe.router import Router, Scores
from titan_moe.ops.permute_indices import sort_by_expert
from titan_moe.runtime.regions import region


class Choice(NamedTuple):
    """The selected experts, and the routes of the tokens there."""

    experts_TK: Tensor
    chosen_BE: Tensor | None
    """Choices of each expert by sequence; None if no loss needs them."""
    routes: list[Route]
    """One for each chunk of the tokens."""


class MoE(nn.Module):
    """Routed experts, plus a shared expert that sees every token.

    `dispatcher` is a strategy, which expert parallelism sets. It moves the tokens in `num_chunks`
    parts: one travels while the experts compute another. `memo` repeats routing in a recomputation.
    `to_experts` and `from_experts` make the tokens that the dispatcher is given and the output of
    the sums that it returns: maps to and from a latent (Nemotron 3), else only places for hooks.
    After a map, a recomputation returns rows once more. `sequence_group` holds the ranks that share
    sequences; None: this rank has whole ones.

    `counts_traffic` is False in steps that no log reads: their traffic is not measured. A graph of
    the whole layer measures it always.

    Buffers: `rows_sent` [2] sums the dispatcher's traffic of this step's tokens; `rows_dropped` []
    the (token, expert) choices that exceeded the capacity, in training or in validation.
    """

    rows_sent: Tensor
    rows_dropped: Tensor

    def __init__(self, dim: int, config: MoEConfig, shared_experts: nn.Module | None) -> None:
        super().__init__()
        self.config = config
        self.router = Router(dim, config)
        self.experts = Experts(config.latent_dim or dim, config)
        self.shared_experts = shared_experts
        self.dispatcher = Dispatcher(config.row_alignment)
        self.num_chunks = 1
        self.sequence_group: ProcessGroup | None = None
        self.to_experts: nn.Module = nn.Identity()
        self.from_experts: nn.Module = nn.Identity()
        if config.latent_dim is not None:
            self.to_experts = nn.Linear(dim, config.latent_dim, bias=False)
            self.from_experts = nn.Linear(config.latent_dim, dim, bias=False)
        self.memo = DecisionMemo()
        self.counts_traffic = True
        self.register_buffer("rows_sent", torch.empty(2, dtype=torch.int64), persistent=False)
        self.register_buffer("rows_dropped", torch.empty((), dtype=torch.int64), persistent=False)
        self.init_buffers()

    def init_buffers(self) -> None:
        """Sets the buffers to their first values; also called after the meta device."""
        self.rows_sent.zero_()
        self.rows_dropped.zero_()

    def forward(
        self,
        x_BSD: Tensor,
        counted_BS: Tensor | None = None,
        stream_BSD: Tensor | None = None,
        ids_BS: Tensor | None = None,
    ) -> Tensor:
        """Returns the layer's output, [B, S, D].

        Args:
            counted_BS: True for the tokens that loads, and so routing biases, and balance losses
                count; None: for all.
            stream_BSD: what the router reads; None: x_BSD.
            ids_BS: the tokens' ids, for a router with a table.
        """
        x_TD = x_BSD.flatten(0, 1)
        with region("route"):
            scores = self.router(x_TD if stream_BSD is None else stream_BSD.flatten(0, 1))
        scores_BSE = scores.scores_TE.unflatten(0, x_BSD.shape[:2])
        choose = partial(self.choose, counted_BS=counted_BS, ids_BS=ids_BS)
        choice = self.memo.decide(choose, scores_BSE)
        with region("route"):
            weights_TK = self.router.weigh(scores.scores_TE, choice.experts_TK)
        if self.training:
            loss = self._balance_loss(scores, choice.chosen_BE, x_BSD.shape[0], counted_BS)
            if loss is not None:
                weights_TK = balance.attach_loss(weights_TK, loss, self.router.balance_loss)

        with region("experts"):
            routed_TD = self.to_experts(x_TD)
        with region("dispatch"):
            chunks = self._chunks(routed_TD), self._chunks(weights_TK), choice.routes
            sent = [self.dispatcher.send(*chunk) for chunk in zip(*chunks, strict=True)]
        # Shared experts compute while rows travel, in the forward and in the backward.
        shared_TD = None
        if self.shared_experts is not None:
            with region("shared_experts"):
                shared_TD = self.shared_experts(x_TD)
        with region("dispatch"):
            for route in choice.routes:
                self._complete(route)
        home = self.experts(self.dispatcher, sent, choice.routes)
        with region("combine"):
            pairs = zip(home, choice.routes, strict=True)
            sums = [self.dispatcher.add_up(*pair) for pair in pairs]
            sum_TD = sums[0] if len(sums) == 1 else torch.cat(sums)
        with region("experts"):
            y_TD = self.from_experts(sum_TD)
        return (y_TD if shared_TD is None else y_TD + shared_TD).view_as(x_BSD)

    def _complete(self, route: Route) -> None:
        """Orders the rows that come and counts those that were dropped; in the forward alone."""
        if route.complete:
            return
        self.dispatcher.order(route)
        route.complete = True
        if route.dropped is not None:
            self.rows_dropped += route.dropped

    def _chunks(self, x_T: Tensor) -> tuple[Tensor, ...]:
        """Cuts a tensor of the tokens, [T, ...], into chunks of a token or more."""
        return (x_T,) if self.num_chunks == 1 else x_T.tensor_split(self.num_chunks)

    def choose(
        self, scores_BSE: Tensor, counted_BS: Tensor | None = None, ids_BS: Tensor | None = None
    ) -> Choice:
        """Selects experts, counts them (in training), and starts the exchange of counts."""
        with region("route"):
            scores_TE, table, named_TK = scores_BSE.flatten(0, 1), self.router.table, None
            if table is not None:
                named_TK = table[ids_BS.flatten()]  # type: ignore[union-attr]
            experts_TK = self.router.select(scores_TE, self.router.expert_bias, named_TK)
            chunks = [
                (chunk_TK, sort_by_expert(chunk_TK, self.config.num_experts))
                for chunk_TK in self._chunks(experts_TK)
            ]
        with region("dispatch"):  # Before all else: counts travel meanwhile.
            routes = [self.dispatcher.route(*chunk) for chunk in chunks]
        chosen_BE = None
        if self.training:
            counted_T = None if counted_BS is None else counted_BS.flatten()
            self.router.observe(scores_BSE.flatten(0, 1), counted_T)
            for (chunk_TK, rows), route in zip(chunks, routes, strict=True):
                if counted_BS is None:
                    self.router.tokens_per_expert += rows.counts_E
                if self.counts_traffic:
                    self.rows_sent += self.dispatcher.traffic(chunk_TK, route)
            if self.config.sequence_aux_loss_weight or counted_BS is not None:
                experts_BSK = experts_TK.view(*scores_BSE.shape[:2], -1)
                chosen_BE = self._counts_per_sequence(experts_BSK, counted_BS)
        return Choice(experts_TK, chosen_BE, routes)

    def _counts_per_sequence(self, experts_BSK: Tensor, counted_BS: Tensor | None) -> Tensor:
        """Returns the choices of each expert by sequence, chosen_BE, and if a loss needs them sums
        them over the ranks that share sequences. Adds this rank's choices to `tokens_per_expert`
        if not all tokens count."""
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


class Experts(nn.Module):
    """Holds the stacked weights of all experts under the names of `ExpertWeights`. `compute` makes
    an expert's output of a row; expert parallelism gives it this rank's shards alone."""

    def __init__(self, dim: int, config: MoEConfig) -> None:
        super().__init__()
        num_experts, hidden_dim = config.num_experts, config.hidden_dim
        gated = config.activation.gated
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim)) if gated else None
        self.b1 = self.b2 = self.b3 = None
        if config.projection_bias:
            self.b1 = nn.Parameter(torch.empty(num_experts, hidden_dim))
            self.b2 = nn.Parameter(torch.empty(num_experts, dim))
            self.b3 = nn.Parameter(torch.empty(num_experts, hidden_dim)) if gated else None
        self.adapter: ExpertAdapter | None = None
        self.compute = ExpertOutputs(
            config.activation, scale_inputs=config.weights_scale == "inputs"
        )

    def forward(self, dispatcher: Dispatcher, sent: list[Any], routes: list[Route]) -> list[Any]:
        """Receives each chunk, computes it and sends its outputs home, while the next one travels.
        Returns the outputs on their way, by chunk.

        One call for all chunks, for which FSDP gathers the weights once.
        """
        weights = dict(self.named_parameters())
        home, late = [], []
        for chunk, route in zip(sent, routes, strict=True):
            with region("dispatch"):
                rows = dispatcher.receive(chunk, route)
            with region("experts"):
                y_RD = self.compute(rows, weights)
            del rows  # From here on a backward alone holds rows that have been received.
            # A recomputation ends in the last chunk, unless something after the layer is kept.
            if recomputing():
                late.append((y_RD, route))
            else:
                with region("combine"):
                    home.append(dispatcher.send_home(y_RD, route))
            del y_RD
        return [*home, *(dispatcher.send_home(*each) for each in late)]


def take_dropped(moe_layers: Iterable[MoE], device: torch.device) -> Tensor:
    """Returns the number of rows that the layers have dropped since the last call, [] int64."""
    dropped = [moe.rows_dropped for moe in moe_layers]
    if not dropped:
        return torch.zeros((), dtype=torch.int64, device=device)
    total = torch.stack(dropped).sum()
    torch._foreach_zero_(dropped)
    return total
