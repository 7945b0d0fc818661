"""Whole steps in bfloat16: their gradients are those of the same steps with sums in float32."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.support.paths import REPO
from tests.support.tiers import split
from titan_moe.config.job_config import Lora
from titan_moe.data.batch import Batch
from titan_moe.distributed.init_weights import fill_initial_weights
from titan_moe.models.decoder import ADAPTER, Decoder, initial_std
from titan_moe.models.lora import adapt
from titan_moe.models.registry import FAMILIES, model_config
from titan_moe.moe.decisions import DecisionMemo
from titan_moe.training.train_step import look_ahead

# torch multiplies experts in bfloat16 slowly on a CPU, and here on one thread.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NARROW, WIDE = torch.bfloat16, torch.float32
ROWS, SEQ_LEN = 8, 512
_ROUNDS = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class WideSums(TorchDispatchMode):
    """Runs every operation on bfloat16 tensors in float32, and rounds its results once.

    Its operands are rounded as in a plain step. So the two differ in how an operation computes,
    which is how it adds up.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, arguments = kwargs or {}, func._schema.arguments
        given = dict(zip((each.name for each in arguments), args, strict=False)) | kwargs
        aliased = [each for each in arguments if each.alias_info]
        written = [each.name for each in aliased if each.alias_info.is_write]
        is_view, is_narrow = len(written) < len(aliased), any(map(_is_narrow, tree_leaves(given)))
        if is_view or not is_narrow or func in _ROUNDS:
            return func(*args, **kwargs)
        wide = tree_map_only(Tensor, lambda x: x.to(WIDE) if _is_narrow(x) else x, given)
        wide = tree_map_only(torch.dtype, lambda x: WIDE if x == NARROW else x, wide)
        found = func(**wide)
        if written:
            for name in written:
                given[name].copy_(wide[name])
            return given[written[0]]
        # The plain operation runs too, for the types of its results.
        like = iter(tree_leaves(func(*args, **kwargs)))
        return tree_map_only(Tensor, lambda x: x.to(next(like).dtype), found)


def _is_narrow(x: object) -> bool:
    return isinstance(x, Tensor) and x.dtype == NARROW


def bytes_of_text() -> Batch:
    """Rows of this repository's pages, of two documents each: some tokens are frequent."""
    text = b"".join(path.read_bytes() for path in sorted((REPO / "docs").glob("*.md")))
    tokens = torch.tensor(list(text[: ROWS * (SEQ_LEN + 1)])).view(ROWS, -1)
    documents = (torch.arange(SEQ_LEN) >= SEQ_LEN // 3).int().expand(ROWS, -1)
    return Batch(tokens[:, :-1], tokens[:, 1:].clone(), documents, [])


def gradients(model: Decoder, batch: Batch, around: AbstractContextManager) -> dict[str, Tensor]:
    """The loss of the bytes, and the gradients of all parameters."""
    model.zero_grad()
    positions = torch.arange(SEQ_LEN).expand(ROWS, -1)
    ahead = look_ahead(batch, 1)
    with around:
        loss = model(batch.tokens_BS, batch.documents_BS, positions, batch.labels_BS, *ahead)
        loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.double() for n, p in model.named_parameters()}


def differences(family: str, change: Callable[[Decoder], object]) -> dict[str, float]:
    """Relative differences of a step's loss and gradients from those with sums in float32, where
    experts and keys are chosen alike; of every family with multi-token prediction and all losses.

    Args:
        change: may plant a mistake in the model.
    """
    config = model_config(family, "debugmodel_moe" if family == "qwen3" else "debugmodel")
    assert config.moe is not None
    if family == "gemma4":
        # Queries times keys, each of norm 8, are divided by 1: with fresh weights a token attends
        # to one other, and each layer multiplies what rounding did before.
        attention, near = (replace(x, scale=1 / 8) for x in (config.attention, config.near))
        config = replace(config, attention=attention, near=near)
    losses = {"sequence_aux_loss_weight": 0.01, "global_aux_loss_weight": 0.02}
    moe = replace(config.moe, **losses, z_loss_weight=0.003)
    model = Decoder(config := replace(config, moe=moe, num_mtp_layers=1))
    fill_initial_weights(model, 0, partial(initial_std, config=config))
    model.output.chunk_size = 1024
    change(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(NARROW)
    memos = [each.contexts() for each in model.modules() if isinstance(each, DecisionMemo)]
    steps = []
    for which, mode in enumerate((nullcontext(), WideSums())):
        with ExitStack() as stack:
            for contexts in memos:
                stack.enter_context(contexts[which])
            steps.append(gradients(model, bytes_of_text(), mode))
    plain, wide = steps
    return {name: ((plain[name] - x).norm() / x.norm()).item() for name, x in wide.items()}


# Among them they have the operations of all; the planted mistake needs all of mixtral right.
SLOW = ["deepseek_v32", "gpt_oss", "kimi_linear", "llama4", "nemotron_h", "qwen3_next"]
BOUND = 0.01
EXCEPTIONS = {
    # Added to all keys, it moves weight between them and a sink alone: the rest cancels.
    "attention.wk.bias": 0.05,
    # Of a head's terms, a few thousandths are left: as much as their rounding adds up to.
    "decay.A_log.weight": 0.5,
    "decay.dt_bias.weight": 0.05,
}


def bound(name: str) -> float:
    return next((bound for end, bound in EXCEPTIONS.items() if name.endswith(end)), BOUND)


@pytest.mark.parametrize("family", split(FAMILIES, [], SLOW))
def test_gradients_in_bfloat16_are_those_with_float32_sums(family: str):
    found = differences(family, lambda model: None)
    assert {name: each for name, each in found.items() if not each < bound(name)} == {}


@pytest.mark.parametrize("family", split(["deepseek_v3", "gpt_oss"], [], ["gpt_oss"]))
def test_gradients_of_adapters_in_bfloat16_are_those_with_float32_sums(family: str):
    def with_adapters(model: Decoder) -> None:
        adapt(model, Lora(rank=8))
        for name, parameter in model.named_parameters():
            if ADAPTER in name:
                nn.init.normal_(parameter, std=0.02)

    found = differences(family, with_adapters)
    assert any(ADAPTER in name for name in found)
    assert {name: each for name, each in found.items() if not each < bound(name)} == {}


def test_torchs_own_embedding_is_seen():
    def plant(model: Decoder) -> None:
        weight = model.tok_embeddings.weight
        model.set_submodule("tok_embeddings", nn.Embedding(*weight.shape, _weight=weight))

    found = differences("mixtral", plant)
    assert [name for name, each in found.items() if each > BOUND] == ["tok_embeddings.weight"]
