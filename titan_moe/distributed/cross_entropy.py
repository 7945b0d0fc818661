"""The sum of cross-entropies, from whole logits or from logits that are cut by vocabulary."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed import ProcessGroup


class CrossEntropy:
    """Of logits [B, S, V]; computed in at least float32."""

    def __init__(self, ignore_index: int) -> None:
        self._ignore_index = ignore_index

    def __call__(self, logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
        return F.cross_entropy(
            logits_BSV.flatten(0, 1).to(_at_least_float32(logits_BSV)),
            labels_BS.flatten(),
            ignore_index=self._ignore_index,
            reduction="sum",
        )


class VocabParallelCrossEntropy:
    """Of logits [B, S, V/tp]: each rank of the group has all tokens and a block of the vocabulary.

    No rank ever holds whole logits; three numbers a token travel (its largest logit, the sum of
    exponentials, its target's logit). A rank's share of the value is that of its part of the
    tokens; its backward is that of the whole sum.
    """

    def __init__(self, group: ProcessGroup, ignore_index: int) -> None:
        self._group = group
        self._ignore_index = ignore_index

    def __call__(self, logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
        return _CutByVocabulary.apply(
            logits_BSV.flatten(0, 1), labels_BS.flatten(), self._ignore_index, self._group
        )


def _at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _CutByVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        logits_TV: Tensor,
        labels_T: Tensor,
        ignore_index: int,
        group: ProcessGroup,
    ) -> Tensor:
        rank, width = dist.get_rank(group), logits_TV.shape[1]
        largest_T = logits_TV.amax(-1).to(_at_least_float32(logits_TV))
        dist.all_reduce(largest_T, dist.ReduceOp.MAX, group=group)
        shifted_TV = logits_TV - largest_T[:, None]
        column_T = labels_T - rank * width
        elsewhere_T = (column_T < 0) | (column_T >= width)
        column_T = column_T.masked_fill(elsewhere_T, 0)
        target_T = shifted_TV.gather(1, column_T[:, None])[:, 0].masked_fill(elsewhere_T, 0)
        exp_TV = shifted_TV.exp_()
        sums = torch.stack([exp_TV.sum(-1), target_T])
        dist.all_reduce(sums, group=group)
        ignored_T = labels_T == ignore_index
        loss_T = (sums[0].log() - sums[1]).masked_fill(ignored_T, 0)
        ctx.save_for_backward(exp_TV, sums[0], column_T, elsewhere_T, ignored_T)
        ctx.dtype = logits_TV.dtype  # type: ignore[attr-defined]
        return loss_T.tensor_split(group.size())[rank].sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override, no-untyped-def]
        exp_TV, sum_T, column_T, elsewhere_T, ignored_T = ctx.saved_tensors
        grad_TV = exp_TV / sum_T[:, None]
        hit_T = (~elsewhere_T).to(grad_TV.dtype)
        # One column a token: nothing is added twice.
        chosen_T = grad_TV.gather(1, column_T[:, None])[:, 0] - hit_T
        grad_TV.scatter_(1, column_T[:, None], chosen_T[:, None])
        grad_TV.masked_fill_(ignored_T[:, None], 0)
        return (grad_TV * grad).to(ctx.dtype), None, None, None
