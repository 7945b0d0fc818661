"""The standard dispatcher: each of the T*K rows is sent to its expert and back."""

import torch
from torch import Tensor

from titan_moe.comm.collectives import AllToAll, start_numbers, to_host
from titan_moe.moe.dispatch.exchange import Draft, ExchangeDispatcher, Plan
from titan_moe.ops.permute_indices import reached_ranks, sort_by_expert


class AllToAllDispatcher(ExchangeDispatcher):
    """One row for each expert of a token."""

    def traffic(self, experts_TK: Tensor, counts_E: Tensor) -> Tensor:
        """Counts rows and (token, rank) pairs on the way to the experts, etp gathering included.

        All etp ranks that hold an expert's slices need its tokens' rows. A row of a remote expert
        is sent once over ep and etp - 1 times over etp; a row of a local expert, the latter only. A
        destination rank that a token reaches for several experts counts for as many rows, and for
        one pair.
        """
        sent_P = counts_E.view(-1, self.num_local).sum(1)
        reached_TP = reached_ranks(experts_TK, self.num_local, len(sent_P))
        rows_2P = torch.stack([sent_P, reached_TP.sum(0)])
        return self.etp_group.size() * rows_2P.sum(1) - rows_2P[:, self.ep_group.rank()]

    def start_counts(self, experts_TK: Tensor, counts_E: Tensor) -> Draft:
        sent_PE = counts_E.view(-1, self.num_local)
        counts = start_numbers(sent_PE, AllToAll.of_table(self.ep_group))
        tokens, slots = sort_by_expert(experts_TK, len(counts_E))
        return Draft(tokens, slots, sent_PE, counts)

    def sizes(self, draft: Draft) -> Plan:
        received_PE, num_rows = draft.counts.wait(), len(draft.rows.source_R)
        gathered_QPE = self.gather_counts(received_PE)
        if self.ep_group.size() == 1:  # Every rank keeps all rows of as many tokens.
            sent, received, gathered = [num_rows], [num_rows], [num_rows] * len(gathered_QPE)
        else:
            # Host sync, once per layer: collectives of rows take their sizes as Python ints.
            sent, received, gathered = to_host(
                draft.sent_PE.sum(1), received_PE.sum(1), gathered_QPE.sum((1, 2))
            )
        exchange = AllToAll(sent, received, self.ep_group)
        counts_PE = gathered_QPE.flatten(0, 1)
        return Plan(num_rows, exchange, exchange, gathered, gathered, counts_PE)
