"""The sum of cross-entropies of logits that are cut by vocabulary, and its gradient."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from titan_moe.ops.linear_cross_entropy import IGNORE_INDEX, at_least_float32


class VocabParallelCrossEntropy:
    """Of logits [T, V/tp]: each rank of the group has all tokens and a block of the vocabulary.

    No rank ever holds whole logits; three numbers a token travel (its largest logit, the sum of
    exponentials, its target's logit). A rank's share of the value is that of its part of the
    tokens; its gradient is that of the whole sum. Collective over the group.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def __call__(self, logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
        """As `kernels.linear_cross_entropy.cross_entropy`."""
        group, width = self._group, logits_TV.shape[1]
        rank = dist.get_rank(group)
        largest_T = logits_TV.amax(-1).to(at_least_float32(logits_TV))
        dist.all_reduce(largest_T, dist.ReduceOp.MAX, group=group)
        shifted_TV = logits_TV.to(largest_T.dtype).sub_(largest_T[:, None])
        column_T = labels_T - rank * width
        elsewhere_T = (column_T < 0) | (column_T >= width)
        column_T1 = column_T.masked_fill(elsewhere_T, 0)[:, None]
        target_T = shifted_TV.gather(1, column_T1)[:, 0].masked_fill(elsewhere_T, 0)
        exp_TV = shifted_TV.exp_()
        sum_T, target_T = sums = torch.stack([exp_TV.sum(-1), target_T])
        dist.all_reduce(sums, group=group)
        ignored_T = labels_T == IGNORE_INDEX
        loss_T = (sum_T.log() - target_T).masked_fill(ignored_T, 0)
        counted_T = (~ignored_T).to(sum_T.dtype)
        grad_TV = exp_TV.mul_((counted_T / sum_T)[:, None])
        # One column a token: nothing is added twice.
        grad_TV.scatter_add_(1, column_T1, -counted_T.masked_fill(elsewhere_T, 0)[:, None])
        return loss_T.tensor_split(group.size())[rank].sum(), grad_TV
