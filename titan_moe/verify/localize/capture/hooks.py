"""Hooks that see every module of a step, forward and backward; the model knows nothing of them.

Forward, a place is what a module returned. Backward, it is the gradient of what a module was given,
made by this module alone: a tensor that goes to several goes to each as a view of its own. So the
first place that is wrong, in either direction, is the module that went wrong.
"""

from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.distributed.parallelize import ShardedModel
from titan_moe.models.attention import Attention
from titan_moe.models.decoder import TENSOR_PLAN, Decoder
from titan_moe.models.indexer import Indexer
from titan_moe.models.output import Output
from titan_moe.moe.experts import ExpertOutputs, Experts
from titan_moe.moe.layer import MoE
from titan_moe.moe.router import Scores
from titan_moe.ops.sparse_attention import unpack_keys
from titan_moe.verify.localize.capture.moe_hooks import MoEHooks
from titan_moe.verify.localize.capture.watcher import Watcher


def watch(sharded: ShardedModel, part: Decoder, watcher: Watcher) -> ExitStack:
    """Watches one stage's modules until the returned stack is closed."""
    stack = ExitStack()
    stack.callback(part.register_forward_pre_hook(watcher.begins, with_kwargs=True).remove)
    for name, module in part.named_modules():
        if name and not isinstance(module, nn.Identity | nn.ModuleDict | Experts | ExpertOutputs):
            _watch_module(name, module, watcher, stack)
        if isinstance(module, MoE):
            MoEHooks(name, module, watcher, sharded).install(stack)
        elif isinstance(module, Attention):
            _watch_core(f"{name}.core", module, watcher, stack)
        elif isinstance(module, Indexer):
            _watch_selection(name, module, watcher, stack)
    return stack


def _watch_module(name: str, module: nn.Module, watcher: Watcher, stack: ExitStack) -> None:
    cut_input = _is(name, "rowwise", "colwise_norm")
    cut_output = _is(name, "colwise", "colwise_norm")

    def given(tensor: str, x: Tensor) -> Tensor:
        return watcher.given(name, tensor, x, watcher.by_token(cut=cut_input or x.ndim == 4))

    def before(module: nn.Module, args: tuple) -> tuple:
        if isinstance(module, Output):  # Its input is that of all depths of prediction.
            x, *others = args
            depths = enumerate(x.split(watcher.now.size))
            parts = [given(f"input of depth {k}" if k else "input", part) for k, part in depths]
            return torch.cat(parts), *others
        return tuple(given("input", x) if isinstance(x, Tensor) else x for x in args)

    def after(module: nn.Module, args: tuple, output: Any) -> None:
        if isinstance(output, Tensor):
            lay = watcher.by_token(cut=cut_output or output.ndim == 4)
            watcher.forward(name, "output", output, lay)
        elif isinstance(output, Scores):
            watcher.forward(name, "scores", output.scores_TE, watcher.by_token())

    # Before a hook of tensor parallelism gathers the input.
    stack.callback(module.register_forward_pre_hook(before, prepend=True).remove)
    stack.callback(module.register_forward_hook(after).remove)


def _is(name: str, *ways: str) -> bool:
    return any(how in ways and fnmatchcase(name, pattern) for pattern, how in TENSOR_PLAN.items())


def _watch_core(name: str, module: Attention, watcher: Watcher, stack: ExitStack) -> None:
    """Records an attention core's queries, keys, values and output, head by head."""
    core = module.core

    def watched(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
        lay, seen = watcher.by_token(cut=True), []
        for tensor, x_BHSC in (("queries", q), ("keys", k), ("values", v)):
            x_BSHC = x_BHSC.transpose(1, 2)
            watcher.forward(name, tensor, x_BSHC, lay)
            seen.append(watcher.given(name, tensor, x_BSHC, lay).transpose(1, 2))
        o_BHSC = core(*seen, *args)
        watcher.forward(name, "output", o_BHSC.transpose(1, 2), lay)
        return o_BHSC

    def end() -> None:
        module.core = core

    module.core = watched
    stack.callback(end)


def _watch_selection(name: str, module: Indexer, watcher: Watcher, stack: ExitStack) -> None:
    """Records each query's scores of keys, the keys that it selects, and the distance of the scores
    from another selection: the lead of the last selected key, infinite if all keys are selected."""
    select, top_k = module.select_fn, module.config.top_k

    def watched(scores_BST: Tensor) -> Tensor:
        keys_BSW, lay = select(scores_BST), watcher.by_token()
        chosen_BST = unpack_keys(keys_BSW, scores_BST.shape[-1])
        ranked_BSK = F.pad(scores_BST, (0, top_k), value=-torch.inf).topk(top_k + 1).values
        lead_BS1 = -ranked_BSK[..., -2:].diff()
        watcher.forward(name, "scores", scores_BST.masked_fill(scores_BST == -torch.inf, 0), lay)
        watcher.forward(name, "choice", chosen_BST.to(scores_BST.dtype), lay)
        watcher.forward(name, "margin", lead_BS1.nan_to_num(torch.inf, torch.inf), lay)
        return keys_BSW

    def end() -> None:
        module.select_fn = select

    module.select_fn = watched
    stack.callback(end)
