"""The gate's first weights, buffers and batches, on which every mistake shows.

An easy configuration proves nothing: `easy` lists what would make this one easy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from titan_moe.config.job_config import JobConfig
from titan_moe.distributed.init_weights import fill_initial_weights
from titan_moe.distributed.parallelize import first_names
from titan_moe.distributed.policies import resolve_model
from titan_moe.models.config import ModelConfig
from titan_moe.models.decoder import Decoder, freeze, initial_std
from titan_moe.ops.attention import explicit_mask, sdpa
from titan_moe.ops.local_attention import LocalAttention
from titan_moe.verify.gradients.reference import (
    IGNORED,
    Reference,
    Rows,
    Step,
    without_balance_losses,
)
from titan_moe.verify.gradients.selected_pairs import SelectedPairs
from titan_moe.verify.gradients.token_by_token import TokenByToken

NUM_STEPS = 2
RATES = (1.0, 0.5)
"""Factors on the peak learning rate, by step."""
MAX_NORM = 0.5
"""The largest max_norm: below the norm of the first gradients."""
OWN_KEYS: Mapping[str, Mapping[str, Any]] = {
    "optimizer": {"weight_decay": 0.1, "eps": 1e-3},
    "moe": {
        "bias_update_speed": 0.05,
        "sequence_aux_loss_weight": 1e-2,
        "global_aux_loss_weight": 1e-2,
        "z_loss_weight": 1e-3,
        "row_alignment": 16,
    },
    "model": {"converters": []},
    "debug": {"moe_force_load_balance": False},
}
"""Values of the proof, in place of a configuration's with which a mistake could pass.
eps is of the gradients' own size: with a tiny one the first updates are signs, and rounding a
gradient near zero flips them."""


@dataclass
class Fixture:
    """One depth and number of sequences: where every layout of it starts and must end."""

    weights: dict[str, Tensor]
    """Float64 values that float32 holds exactly, so that both types start alike."""
    buffers: dict[str, Tensor]
    production: dict[str, Tensor]
    """The initial weights that production draws in one process."""
    batches: list[Rows]
    steps: list[Step]
    idle: tuple[str, range]
    """The layer and the experts that no token chooses: the only gradients declared zero."""


def make_fixture(job: JobConfig, config: ModelConfig, num_rows: int) -> Fixture:
    """Draw weights and batches from the job's seed and train the reference on them."""
    config = resolve_model(config, job)
    assert config.moe is not None, "the gate wants a model with experts"
    model = _plain_model(job, config)
    weights = seed_weights(model, job.debug.seed)
    weights |= {copy: weights[first] for copy, first in first_names(config).items()}
    layers = list(model.moe_layers())
    # If groups limit the choice, an expert that scores low takes its group with it.
    group_size = config.moe.num_experts // config.moe.num_groups if config.moe.num_groups > 1 else 1
    first = config.moe.num_experts // 2
    idle = (layers[len(layers) // 2], range(first, first + group_size))
    buffers = seed_buffers(layers, config.moe.num_experts, idle, job.debug.seed)
    batches = [
        make_rows(num_rows, job.training.seq_len, config.vocab_size, seed=job.debug.seed + step)
        for step in range(NUM_STEPS)
    ]
    production = _production_weights(job, config)
    reference = Reference(
        model,
        config,
        weights=weights,
        buffers=buffers,
        optimizer=job.optimizer,
        training=job.training,
    )
    steps = [
        reference.step(rows, factor * job.optimizer.lr)
        for rows, factor in zip(batches, RATES, strict=True)
    ]
    return Fixture(weights, buffers, production, batches, steps, idle)


def seed_weights(model: Decoder, seed: int) -> dict[str, Tensor]:
    """Every parameter: norms around 1, biases around 0, matrices that keep the scale of what they
    multiply; recurrent states that last for tens of tokens."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            drawn = 0.1 * noise + (0 if name.endswith("bias") else 1)
            drawn -= 5 if "A_log" in name else 0
        else:
            drawn = noise if "embeddings" in name else noise * parameter.shape[-1] ** -0.5
        weights[name] = drawn.double()
    return weights


def seed_buffers(
    layers: Sequence[str], num_experts: int, idle: tuple[str, range], seed: int
) -> dict[str, Tensor]:
    """Routing biases and loads as in mid-training; the idle experts' biases keep tokens away."""
    generator = torch.Generator().manual_seed(seed)
    buffers = {}
    for layer in layers:
        bias_E = 0.02 * torch.randn(num_experts, generator=generator)
        if layer == idle[0]:
            bias_E[list(idle[1])] = -10.0
        load_E = torch.rand(num_experts, generator=generator) + 0.5
        buffers[f"{layer}.moe.router.expert_bias"] = bias_E
        buffers[f"{layer}.moe.router.previous_load"] = load_E / load_E.sum()
    return buffers


def make_rows(num_rows: int, seq_len: int, vocab_size: int, *, seed: int) -> Rows:
    """Packed rows; the number of ignored targets differs from row to row and from part to part. The
    last row is one document: a recurrent layer's chunks lie before and after one of its chunks."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab_size, (num_rows, seq_len + 1), generator=generator)
    ends = torch.rand(num_rows, seq_len, generator=generator) < 3 / seq_len
    ends[:-1, seq_len // 2] = True
    ends[-1] = False
    documents = ends.cumsum(1) - ends.long()
    labels = tokens[:, 1:].masked_fill(ends, IGNORED)
    for row in range(num_rows):
        labels[row, : (7 * row + seed) % (seq_len // 2)] = IGNORED
    labels[num_rows // 3] = IGNORED
    return Rows(tokens[:, :-1].contiguous(), labels, documents.int())


def easy(fixture: Fixture, job: JobConfig) -> list[str]:
    """Reasons why this fixture would let a mistake pass; one line each."""
    layer, idle = fixture.idle
    first, *later = fixture.steps
    zero = {
        f"{name}[{e}]"
        for step in fixture.steps
        for name, norm in norms(step.gradients).items()
        for e in (norm == 0).nonzero().flatten().tolist()
    }
    experts = f"{layer}.moe.experts."
    stacks = [name for name in first.gradients if name.startswith(experts)]
    declared = {f"{name}[{e}]" for name in stacks for e in idle}
    lengths = [(rows.labels_BS != IGNORED).sum(1) for rows in fixture.batches]
    facts = {
        "clipping is not active": all(s.grad_norm > job.training.max_norm for s in fixture.steps),
        "the auxiliary losses are zero": all(s.balance_loss > 0 for s in fixture.steps),
        "every row has the same number of targets": all(len(set(n.tolist())) > 3 for n in lengths),
        "no row is without a target": all(n.min() == 0 for n in lengths),
        "documents are not packed": all(r.documents_BS.max() > 1 for r in fixture.batches),
        "idle experts have tokens": not any(
            s.counts[layer][list(idle)].any() for s in fixture.steps
        ),
        f"gradients other than the declared are zero: {sorted(zero ^ declared)}": zero == declared,
        "both steps route alike": any(
            not torch.equal(first.counts[name], step.counts[name])
            for step in later
            for name in first.counts
        ),
    }
    return [line for line, holds in facts.items() if not holds]


def norms(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The norm of each tensor, [1]; of a stack of experts, of each one, [E]."""
    return {
        name: tensor.double().flatten(1).norm(dim=1)
        if ".experts." in name
        else tensor.double().norm()[None]
        for name, tensor in tensors.items()
    }


def at_depth(config: ModelConfig, num_layers: int) -> ModelConfig:
    """The flavor with another number of layers."""
    return replace(config, num_layers=num_layers)


class AllPairs:
    """An attention core by an explicit mask and torch's own kernel over all pairs: the oracle."""

    def __init__(self, *, mask_documents: bool) -> None:
        self._mask_documents = mask_documents

    def mask(
        self, documents_BS: Tensor, local: LocalAttention | None = None, bounds: object = None
    ) -> Tensor:
        return explicit_mask(documents_BS, local, mask_documents=self._mask_documents)

    __call__ = staticmethod(sdpa)


def _plain_model(job: JobConfig, config: ModelConfig) -> Decoder:
    masked = job.training.mask_documents
    core = (AllPairs if config.indexer is None else SelectedPairs)(mask_documents=masked)
    recurrence = TokenByToken(mask_documents=masked)
    model = Decoder(without_balance_losses(config), core, recurrence)
    freeze(model)
    return model


def _production_weights(job: JobConfig, config: ModelConfig) -> dict[str, Tensor]:
    model = _plain_model(job, config)
    fill_initial_weights(
        model,
        job.debug.seed,
        lambda name: initial_std(name, config),
        drawn_as=first_names(config),
    )
    return {name: p.detach().clone() for name, p in model.named_parameters()}
