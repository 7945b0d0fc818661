"""Hooks that see every module of a step, forward and backward; the model knows nothing of them.

Forward, a place is what a module returned. Backward, it is the gradient of what a module was given,
made by this module alone: a tensor that goes to several goes to each as a view of its own. So the
first place that is wrong, in either direction, is the module that went wrong.
"""

import math
from fnmatch import fnmatchcase
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from titan_moe.comm.collectives import recomputing
from titan_moe.models.attention import Attention
from titan_moe.models.decoder import Decoder
from titan_moe.models.indexer import Indexer
from titan_moe.models.output import Output
from titan_moe.models.tensor_plan import TENSOR_PLAN
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.dispatch.base import ExpertRows
from titan_moe.moe.experts import ExpertWeights
from titan_moe.moe.layer import Experts, MoE
from titan_moe.moe.router import Scores
from titan_moe.ops.sparse_attention import unpack_keys
from titan_moe.parallelize.parallelize import ShardedModel
from titan_moe.training.capture.records import EXPERTS, Sketches
from titan_moe.training.capture.sketch import sketch_rows
from titan_moe.training.capture.watcher import Lay, Watcher


def watch(sharded: ShardedModel, part: Decoder, watcher: Watcher) -> list[RemovableHandle]:
    """Watches one stage's modules until the returned hooks are removed."""
    hooks = [part.register_forward_pre_hook(watcher.begins, with_kwargs=True)]
    for name, module in part.named_modules():
        # Without parameters is what passes tensors on or decides, which is watched by its owner.
        if name and any(True for _ in module.parameters()) and not isinstance(module, Experts):
            hooks += _watch_module(name, module, watcher)
        if isinstance(module, MoE):
            hooks += _watch_routing(name, module, watcher)
            hooks += _watch_experts(name, module, watcher, sharded)
        elif isinstance(module, Attention):
            hooks += _watch_core(f"{name}.core", module, watcher)
        elif isinstance(module, Indexer):
            hooks.append(_watch_selection(name, module, watcher))
    return hooks


def _watch_module(name: str, module: nn.Module, watcher: Watcher) -> list[RemovableHandle]:
    heads = [_is(f"{name}.{child}", "heads") for child, _ in module.named_children()]
    by_heads = bool(heads) and all(heads)  # All that it multiplies is cut, so its tensors are.
    cut_input = by_heads or _is(name, "rowwise", "colwise_norm")
    cut_output = by_heads or _is(name, "colwise", "colwise_norm")

    def given(tensor: str, x: Tensor) -> Tensor:
        return watcher.given(name, tensor, x, watcher.by_token(cut=cut_input or x.ndim == 4))

    def before(module: nn.Module, args: tuple) -> tuple:
        if isinstance(module, Output):  # Its input is that of all depths of prediction.
            x, *others = args
            depths = enumerate(x.split(watcher.now.size))
            views = [given(f"input of depth {k}" if k else "input", own) for k, own in depths]
            return torch.cat(views), *others
        return tuple(
            given(f"input {place + 1}" if place else "input", x) if isinstance(x, Tensor) else x
            for place, x in enumerate(args)
        )

    def after(module: nn.Module, args: tuple, output: Any) -> None:
        if isinstance(output, Tensor):
            lay = watcher.by_token(cut=cut_output or output.ndim == 4)
            watcher.forward(name, "output", output, lay)
        elif isinstance(output, Scores):
            watcher.forward(name, "scores", output.scores_TE, watcher.by_token())

    # Before a hook of tensor parallelism gathers the input.
    first = module.register_forward_pre_hook(before, prepend=True)
    return [first, module.register_forward_hook(after)]


def _is(name: str, *ways: str) -> bool:
    return any(how in ways and fnmatchcase(name, pattern) for pattern, how in TENSOR_PLAN.items())


def _watch_core(name: str, module: Attention, watcher: Watcher) -> list[RemovableHandle]:
    """Records an attention core's queries, keys, values and output, head by head."""

    def before(module: nn.Module, args: tuple) -> tuple:
        core, q, k, v, *others = args
        lay, seen = watcher.by_token(cut=True), []
        for tensor, x_BHSC in (("queries", q), ("keys", k), ("values", v)):
            x_BSHC = x_BHSC.transpose(1, 2)
            watcher.forward(name, tensor, x_BSHC, lay)
            seen.append(watcher.given(name, tensor, x_BSHC, lay).transpose(1, 2))
        return core, *seen, *others

    def after(module: nn.Module, args: tuple, o_BHSC: Tensor) -> None:
        watcher.forward(name, "output", o_BHSC.transpose(1, 2), watcher.by_token(cut=True))

    attend = module.attend
    return [attend.register_forward_pre_hook(before), attend.register_forward_hook(after)]


def _watch_selection(name: str, module: Indexer, watcher: Watcher) -> RemovableHandle:
    """Records each query's scores of keys, the keys that it selects, and the distance of the scores
    from another selection: the lead of the last selected key, infinite if all keys are selected."""
    top_k = module.config.top_k

    def after(module: nn.Module, args: tuple[Tensor], keys_BSW: Tensor) -> None:
        (scores_BST,), lay = args, watcher.by_token()
        chosen_BST = unpack_keys(keys_BSW, scores_BST.shape[-1])
        ranked_BSK = F.pad(scores_BST, (0, top_k), value=-torch.inf).topk(top_k + 1).values
        lead_BS1 = -ranked_BSK[..., -2:].diff()
        watcher.forward(name, "scores", scores_BST.masked_fill(scores_BST == -torch.inf, 0), lay)
        watcher.forward(name, "choice", chosen_BST.to(scores_BST.dtype), lay)
        watcher.forward(name, "margin", lead_BS1.nan_to_num(torch.inf, torch.inf), lay)

    return module.select.register_forward_hook(after)


def _watch_routing(name: str, moe: MoE, watcher: Watcher) -> list[RemovableHandle]:
    """Records the experts that each token chose, and their weights."""
    router, weigh, config = f"{name}.router", f"{name}.router.weigh", moe.config

    def selected(module: nn.Module, args: tuple[Tensor, Tensor], experts_TK: Tensor) -> None:
        def choice(scores_TE: Tensor) -> Tensor:
            return torch.zeros_like(scores_TE).scatter_(1, experts_TK, 1)

        def margin(scores_TE: Tensor) -> Tensor:
            return choice_margins(scores_TE, bias_E, config)[:, None]

        scores_TE, bias_E = args[:2]
        watcher.forward(router, "choice", scores_TE, watcher.by_token(choice))
        watcher.forward(router, "margin", scores_TE, watcher.by_token(margin))

    def weighs(module: nn.Module, args: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        scores_TE, experts_TK = args
        return watcher.given(weigh, "scores", scores_TE, watcher.by_token()), experts_TK

    def weighed(module: nn.Module, args: tuple[Tensor, Tensor], weights_TK: Tensor) -> Tensor:
        order_TK = args[1].argsort(1)  # A token's weights are in the order of its experts' numbers.
        lay = watcher.by_token(lambda x_TK: x_TK.gather(1, order_TK))
        watcher.forward(weigh, "weights", weights_TK, lay)
        return watcher.given(f"{name}.dispatcher.dispatch", "weights", weights_TK, lay)

    return [
        moe.router.select.register_forward_hook(selected),
        moe.router.weigh.register_forward_pre_hook(weighs),
        moe.router.weigh.register_forward_hook(weighed),
    ]


def _watch_experts(
    name: str, moe: MoE, watcher: Watcher, sharded: ShardedModel
) -> list[RemovableHandle]:
    """Records the tokens that are sent to experts, each expert's rows, and the sums that return.

    Rows have forgotten their tokens where experts see them, so they are summed by expert.
    """
    dispatch, experts = f"{name}.dispatcher.dispatch", f"{name}.experts"
    combine, compute = f"{name}.dispatcher.combine", moe.experts.compute
    dims, rank = sharded.meshes.dims, sharded.meshes.rank
    own_E = torch.arange(moe.config.num_experts).chunk(dims.ep)[dims.coordinate(rank, "ep")]
    chunks = count()  # Rows of one expert on one rank, in several microbatches, add up.

    def by_row(rows: ExpertRows, slices: int) -> Lay:
        """Returns the sketch of tensors by row: the sum over the rows of each expert. Each of so
        many ranks with slices of an expert has the same rows; with 1, a summand of them."""

        def lay(x_R: Tensor, gradient: bool) -> Sketches:
            x_RF = x_R.view(len(x_R), math.prod(x_R.shape[1:]))  # No -1: maybe no rows.
            row_R = torch.arange(len(x_RF), device=x_RF.device)
            expert_R = torch.searchsorted(rows.offsets_E, row_R, right=True)
            # Padding has no token, and rows past the last expert's were never written.
            mine_R = (expert_R < len(rows.offsets_E)) & (rows.weights_R.detach() != 0)
            sketches = sketch_rows(x_RF[mine_R])
            sums = sketches.new_zeros(len(rows.offsets_E), sketches.shape[1])
            sums.index_add_(0, expert_R[mine_R], sketches)
            experts_E = own_E if rows.borrowed is None else rows.borrowed.experts_E.cpu()
            return Sketches(EXPERTS, experts_E, sums / slices, rank << 32 | next(chunks))

        return lay

    def leave(module: nn.Module, args: tuple[Tensor], x_TD: Tensor) -> Tensor:
        return watcher.given(dispatch, "tokens", x_TD, watcher.by_token())

    def arrive(
        module: nn.Module, args: tuple[ExpertRows, ExpertWeights]
    ) -> tuple[ExpertRows, ExpertWeights]:
        rows, weights = args
        lay = by_row(rows, dims.etp)
        watcher.forward(dispatch, "rows", rows.x_RD, lay)
        watcher.forward(dispatch, "weights", rows.weights_R, lay)
        lay = by_row(rows, 1)
        x_RD = watcher.given(experts, "input", rows.x_RD, lay)
        weights_R = watcher.given(experts, "weights", rows.weights_R, lay)
        return rows._replace(x_RD=x_RD, weights_R=weights_R, again_RD=None), weights

    def computed(module: nn.Module, args: tuple[ExpertRows, ExpertWeights], y_RD: Tensor) -> Tensor:
        if not recomputing():  # A recomputation ends before the last output.
            watcher.forward(experts, "output", y_RD, by_row(args[0], 1))
        return watcher.given(combine, "rows", y_RD, by_row(args[0], dims.etp))

    def came_home(module: nn.Module, args: tuple[Tensor], y_TD: Tensor) -> None:
        watcher.forward(combine, "output", y_TD, watcher.by_token())

    return [
        moe.to_experts.register_forward_hook(leave),
        compute.register_forward_pre_hook(arrive, prepend=True),
        compute.register_forward_hook(computed),
        moe.from_experts.register_forward_hook(came_home),
    ]


def choice_margins(scores_TE: Tensor, bias_E: Tensor, config: MoEConfig) -> Tensor:
    """Returns the distance of each token's scores from another choice, [T]: the lead of the last
    expert that is chosen over the first that is not, or of the last group over the next where that
    is less."""
    biased_TE = scores_TE.detach().double() + bias_E
    margin_T = biased_TE.new_full((len(biased_TE),), torch.inf)
    if config.table_rows:
        return margin_T
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
