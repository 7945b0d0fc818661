"""Hooks that see every module of a step, forward and backward; the model knows nothing of them.

Forward, a place is what a module returned. Backward, it is the gradient of what a module was given,
made by this module alone: a tensor that goes to several goes to each as a view of its own. So the
first place that is wrong, in either direction, is the module that went wrong.
"""

from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from titan_moe.distributed.parallelize import ShardedModel
from titan_moe.models.attention import Attention
from titan_moe.models.decoder import TENSOR_PLAN, Decoder
from titan_moe.models.mtp import MultiTokenPrediction
from titan_moe.models.output import Output
from titan_moe.moe.experts import Experts
from titan_moe.moe.layer import MoE
from titan_moe.moe.router import Scores
from titan_moe.verify.localize.capture.moe_hooks import MoEHooks
from titan_moe.verify.localize.capture.records import Place
from titan_moe.verify.localize.capture.watcher import Watcher, on_gradient

_CUT_OUTPUTS = ("colwise", "vocab_columns")
_CUT_INPUTS = ("rowwise",)
_USERS = {"shares": "{} (balance losses)"}
"""Who makes the gradients of what a router returns, where it is not the router itself."""


def watch(sharded: ShardedModel, part: Decoder, watcher: Watcher) -> ExitStack:
    """Watches one stage's modules until the returned stack is closed."""
    stack = ExitStack()
    stack.callback(part.register_forward_pre_hook(watcher.begins, with_kwargs=True).remove)
    for name, module in part.named_modules():
        for handle in _hooks(name, module, watcher):
            stack.callback(handle.remove)
        if isinstance(module, MoE):
            MoEHooks(name, module, watcher, sharded).install(stack)
        elif isinstance(module, Output):
            _watch_logits(module, watcher, stack)
        elif isinstance(module, Attention):
            _watch_core(f"{name}.core", module, watcher, stack)
    return stack


def _hooks(name: str, module: nn.Module, watcher: Watcher) -> list[RemovableHandle]:
    if not name or isinstance(module, nn.Identity | nn.ModuleDict | Experts):
        return []
    cut_input, cut_output = _is(name, _CUT_INPUTS), _is(name, _CUT_OUTPUTS)

    def before(module: nn.Module, args: tuple) -> tuple:
        return tuple(
            watcher.given(name, "input", x, cut=cut_input or x.ndim == 4)
            if isinstance(x, Tensor)
            else x
            for x in args
        )

    def after(module: nn.Module, args: tuple, output: Any) -> None:
        if isinstance(output, Tensor):
            watcher.forward(name, "output", output, cut=cut_output or output.ndim == 4)
        elif isinstance(output, Scores):
            for field, x in output._asdict().items():
                tensor = field.partition("_")[0]
                watcher.forward(name, tensor, x)
                watcher.backward(_USERS.get(tensor, "{}").format(name), tensor, x)

    # Before a hook of tensor parallelism gathers the input.
    handles = [module.register_forward_pre_hook(before, prepend=True)]
    # What it returns are its layers' outputs, once more.
    if not isinstance(module, MultiTokenPrediction | Output):
        handles.append(module.register_forward_hook(after))
    return handles


def _is(name: str, ways: tuple[str, ...]) -> bool:
    return any(how in ways and fnmatchcase(name, pattern) for pattern, how in TENSOR_PLAN.items())


def _watch_logits(module: Output, watcher: Watcher, stack: ExitStack) -> None:
    """Records the logits of the decoder, those of each depth of multi-token prediction, and the
    gradients that the loss makes of them. Both come in chunks, of which none is there later."""
    logits, gradients = [], []

    def watch(first_token: int, logits_TV: Tensor, grad_TV: Tensor) -> None:
        logits.append(logits_TV)
        gradients.append(grad_TV)

    def after(module: nn.Module, args: tuple, loss: Tensor) -> None:
        if not logits:
            return
        shape, size = (len(args[0]), -1, logits[0].shape[-1]), watcher.now.size
        logits_BSV, grad_BSV = torch.cat(logits).view(shape), torch.cat(gradients).view(shape)
        logits.clear()
        gradients.clear()
        names = ["loss"]
        for depth, x in enumerate(logits_BSV.split(size)):
            tensor = f"logits of depth {depth}" if depth else "logits"
            names += [f"mtp.loss of depth {depth}"] * (depth > 0)
            watcher.forward("output", tensor, x, cut=True)
        places = [Place("backward", name, "logits") for name in names]
        for place in places:
            watcher.order(place)
        lay = watcher.by_token(cut=True, gradient=True)

        def keep(factor: Tensor) -> None:
            for place, x in zip(places, (grad_BSV * factor).split(size), strict=True):
                watcher.keep(place, x, lay)

        on_gradient(loss, keep)

    def end() -> None:
        module.watch = None

    module.watch = watch
    stack.callback(end)
    stack.callback(module.register_forward_hook(after).remove)


def _watch_core(name: str, module: Attention, watcher: Watcher, stack: ExitStack) -> None:
    """Records an attention core's queries, keys, values and output, head by head."""
    core = module.core

    def watched(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
        seen = []
        for tensor, x_BHSC in (("queries", q), ("keys", k), ("values", v)):
            x_BSHC = x_BHSC.transpose(1, 2)
            watcher.forward(name, tensor, x_BSHC, cut=True)
            x_BSHC = watcher.given(name, tensor, x_BSHC, cut=True)
            seen.append(x_BSHC.transpose(1, 2))
        o_BHSC = core(*seen, *args)
        watcher.forward(name, "output", o_BHSC.transpose(1, 2), cut=True)
        return o_BHSC

    def end() -> None:
        module.core = core

    module.core = watched
    stack.callback(end)
