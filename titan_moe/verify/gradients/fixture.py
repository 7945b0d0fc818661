"""The gate's first weights, buffers and batches, on which every mistake shows.

An easy configuration proves nothing: `easy` lists what would make this one easy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from titan_moe.config.job_config import JobConfig
from titan_moe.data.batch import Batch
from titan_moe.distributed.init_weights import fill_initial_weights
from titan_moe.models.config import ModelConfig
from titan_moe.models.decoder import Decoder, initial_std
from titan_moe.models.lora import adapt
from titan_moe.models.output import ZeroCentredRMSNorm
from titan_moe.models.trained import freeze
from titan_moe.parallelize.parallelize import first_names
from titan_moe.parallelize.policies import resolve_model
from titan_moe.verify.gradients.cores import AllPairs, SelectedPairs, TokenByToken
from titan_moe.verify.gradients.reference import IGNORED, Reference, Step, without_balance_losses

NUM_STEPS = 2
RATES = (1.0, 0.5)
"""Factors on the peak learning rate, by step."""
MAX_NORM, MAX_NORM_OF_A_PART = 0.5, 0.02
"""The largest max_norm, below the norm of the first gradients: of all parameters, and of those that
train beside frozen ones."""
ADAPTER_SCALE = 0.3
"""Factor of adapters' products. A much larger one makes a model that turns rounding errors of the
first step into errors of 1e-8 in the second."""
OWN_KEYS: Mapping[str, Mapping[str, Any]] = {
    "optimizer": {"weight_decay": 0.1, "eps": 1e-3},
    "moe": {
        "bias_update": "sign",
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
    batches: list[Batch]
    """The global batch of each step."""
    steps: list[Step]
    idle: tuple[str, range]
    """The layer and the experts that no token chooses: the only gradients declared zero."""


def own_tables(job: JobConfig) -> dict[str, Mapping[str, Any]]:
    """Returns the values of the proof for a job, by table and key."""
    rank = job.lora.rank
    largest = MAX_NORM_OF_A_PART if rank or job.training.freeze else MAX_NORM
    tables = {"training": {"max_norm": min(job.training.max_norm, largest)}, **OWN_KEYS}
    if rank:
        tables["lora"] = {"alpha": ADAPTER_SCALE * rank, "rank_stabilised": False}
    return tables


def make_fixture(job: JobConfig, config: ModelConfig, num_sequences: int) -> Fixture:
    """Draw weights and batches from the job's seed and train the reference on them."""
    config = resolve_model(config, job, "cpu")
    assert config.moe is not None, "the gate wants a model with experts"
    masked = job.training.mask_documents
    core = (AllPairs if config.indexer is None else SelectedPairs)(mask_documents=masked)
    recurrence: Any = TokenByToken(mask_documents=masked)  # Shares no code with a Recurrence.
    model = Decoder(without_balance_losses(config), core, recurrence)
    adapt(model, job.lora)
    freeze(model, job.training, job.lora)
    std_of, copies = partial(initial_std, config=config), first_names(config)
    fill_initial_weights(model, job.debug.seed, std_of, drawn_as=copies)
    production = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights = seed_weights(model, job.debug.seed)
    weights |= {copy: weights[first] for copy, first in copies.items()}
    layers = list(model.moe_layers())
    # If groups limit the choice, an expert that scores low takes its group with it.
    group_size = config.moe.num_experts // config.moe.num_groups if config.moe.num_groups > 1 else 1
    first = config.moe.num_experts // 2
    scoring = [name for name, moe in model.moe_layers().items() if moe.router.table is None]
    idle = (scoring[len(scoring) // 2], range(first, first + group_size))
    buffers = seed_buffers(layers, config.moe.num_experts, idle, job.debug.seed)
    scaled = [name for name, block in model.blocks().items() if block.scale is not None]
    buffers |= {
        f"{name}.scale": torch.tensor([0.9 + 0.2 * (n % 2)]) for n, name in enumerate(scaled)
    }
    sizes = num_sequences, job.training.seq_len, config.vocab_size
    batches = [make_batch(*sizes, seed=job.debug.seed + step) for step in range(NUM_STEPS)]
    reference = Reference(model, config, job, weights, buffers)
    steps = [reference.step(batch, factor) for batch, factor in zip(batches, RATES, strict=True)]
    return Fixture(weights, buffers, production, batches, steps, idle)


def seed_weights(model: Decoder, seed: int) -> dict[str, Tensor]:
    """Every parameter: norms multiply by about 1, biases are around 0, matrices keep the scale of
    what they multiply; recurrent states last for tens of tokens."""
    generator, modules = torch.Generator().manual_seed(seed), model.named_modules()
    around_0 = {f"{name}.weight" for name, norm in modules if isinstance(norm, ZeroCentredRMSNorm)}
    weights = {}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            drawn = 0.1 * noise + (0 if name.endswith("bias") or name in around_0 else 1)
            drawn -= 5 if "A_log" in name else 0
            drawn *= len(drawn) ** 0.5 if name.endswith("router.scale") else 1
        else:
            drawn = noise if "embeddings" in name else noise * parameter.shape[-1] ** -0.5
        weights[name] = drawn.double()
    return weights


def seed_buffers(
    layers: Sequence[str], num_experts: int, idle: tuple[str, range], seed: int
) -> dict[str, Tensor]:
    """Routing biases and loads as in mid-training; the idle experts' biases keep tokens away.

    The biases lie below all scores: shifted alike, they choose as before, and a mistake that gives
    an expert outside the best groups a score of 0 makes it the best.
    """
    generator = torch.Generator().manual_seed(seed)
    buffers = {}
    for layer in layers:
        bias_E = 0.02 * torch.randn(num_experts, generator=generator) - 5
        if layer == idle[0]:
            bias_E[list(idle[1])] = -15.0
        load_E = torch.rand(num_experts, generator=generator) + 0.5
        buffers[f"{layer}.moe.router.expert_bias"] = bias_E
        buffers[f"{layer}.moe.router.previous_load"] = load_E / load_E.sum()
    return buffers


def make_batch(num_sequences: int, seq_len: int, vocab_size: int, *, seed: int) -> Batch:
    """Packed sequences; the number of ignored targets differs from one to the next and along each.
    The last is one document: a recurrent layer's chunks lie before and after one of its chunks."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab_size, (num_sequences, seq_len + 1), generator=generator)
    ends = torch.rand(num_sequences, seq_len, generator=generator) < 3 / seq_len
    ends[:-1, seq_len // 2] = True
    ends[-1] = False
    documents = ends.cumsum(1) - ends.long()
    labels = tokens[:, 1:].masked_fill(ends, IGNORED)
    for number in range(num_sequences):
        labels[number, : (7 * number + seed) % (seq_len // 2)] = IGNORED
    labels[num_sequences // 3] = IGNORED
    samples: list[list[str]] = [[] for _ in labels]
    return Batch(tokens[:, :-1].contiguous(), labels, documents.int(), samples)


def own_batches(
    batch: Batch, local_batch_size: int, data_rank: int, data_ranks: int
) -> list[Batch]:
    """Returns the microbatches of one data rank."""
    own = len(batch.samples) // data_ranks
    tensors = batch.tokens_BS, batch.labels_BS, batch.documents_BS, batch.samples
    return [
        Batch(*(whole[start : start + local_batch_size] for whole in tensors))  # type: ignore[arg-type]
        for start in range(own * data_rank, own * (data_rank + 1), local_batch_size)
    ]


def easy(fixture: Fixture, job: JobConfig) -> list[str]:
    """Reasons why this fixture would let a mistake pass; one line each."""
    layer, idle = fixture.idle
    zero = {
        f"{name}[{e}]"
        for step in fixture.steps
        for name, norm in norms(step.tensors["gradient"]).items()
        for e in (norm == 0).nonzero().flatten().tolist()
    }
    experts = f"{layer}.moe.experts."
    stacks = [name for name in fixture.steps[0].tensors["gradient"] if name.startswith(experts)]
    declared = {f"{name}[{e}]" for name in stacks for e in idle}
    first, second = (step.tensors["counts"] for step in fixture.steps)
    numbers = [step.numbers for step in fixture.steps]
    lengths = [(batch.labels_BS != IGNORED).sum(1) for batch in fixture.batches]
    return unmet(
        {
            "clipping is not active": all(n["grad_norm"] > job.training.max_norm for n in numbers),
            "the auxiliary losses are zero": all(n["balance_loss"] > 0 for n in numbers),
            "every sequence has the same number of targets": all(
                len(set(n.tolist())) > 3 for n in lengths
            ),
            "no sequence is without a target": all(n.min() == 0 for n in lengths),
            "documents are not packed": all(b.documents_BS.max() > 1 for b in fixture.batches),
            "idle experts have tokens": not any(
                counts[layer][list(idle)].any() for counts in (first, second)
            ),
            f"gradients other than the declared are zero: {sorted(zero ^ declared)}": zero
            == declared,
            "both steps route alike": any(
                not torch.equal(first[name], second[name]) for name in first
            ),
        }
    )


def unmet(facts: Mapping[str, bool]) -> list[str]:
    """Returns the keys whose value is False."""
    return [line for line, holds in facts.items() if not holds]


def norms(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The norm of each tensor, [1]; of a stack of experts, of each one, [E]."""
    return {
        name: tensor.double().flatten(1).norm(dim=1)
        if ".experts." in name
        else tensor.double().norm()[None]
        for name, tensor in tensors.items()
    }
