"""Sparse attention with heads cut over `tp` and tokens cut over `cp`.

Under `tp` each rank selects keys for all tokens it has gathered, from the same numbers. Under `cp`
keys and values of whole sequences are gathered, and the indexer's keys; each rank selects for its
own queries.
"""

from torch import Tensor
from torch.distributed import ProcessGroup

from titan_moe.distributed.context_parallel.apply import local_positions, whole_sequence
from titan_moe.ops.sparse_attention import SparseAttention


def sparse_core(
    *, tp_group: ProcessGroup, cp_group: ProcessGroup, balanced: bool, mask_documents: bool
) -> SparseAttention:
    """The core of layers with an indexer. `balanced`: head-tail balance of `cp`."""
    heads_group = tp_group if tp_group.size() > 1 else None
    if cp_group.size() == 1:
        return SparseAttention(mask_documents=mask_documents, heads_group=heads_group)
    return GatheredSparseAttention(
        cp_group, balanced=balanced, mask_documents=mask_documents, heads_group=heads_group
    )


class GatheredSparseAttention(SparseAttention):
    """Local queries select among the keys of whole sequences. Its calls are collective.

    Args:
        group: the ranks of `cp`, two or more.
        balanced: head-tail balance; else consecutive positions.
    """

    def __init__(
        self,
        group: ProcessGroup,
        *,
        balanced: bool,
        mask_documents: bool,
        heads_group: ProcessGroup | None,
    ) -> None:
        super().__init__(mask_documents=mask_documents, heads_group=heads_group)
        self._group, self._balanced = group, balanced

    def mask(self, documents_BS: Tensor, local=None, bounds=None) -> Tensor:  # type: ignore[no-untyped-def]
        length, size, rank = documents_BS.shape[1], self._group.size(), self._group.rank()
        device = documents_BS.device
        own_S = local_positions(length, size, rank, balanced=self._balanced, device=device)
        return super().mask(documents_BS, local)[:, own_S]

    def whole_sequences(self, x_BHSC: Tensor) -> Tensor:
        return whole_sequence(x_BHSC, self._group, balanced=self._balanced)
