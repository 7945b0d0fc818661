"""Low-rank adapters (LoRA, arXiv 2106.09685) of a model's layers and experts.

An adapter stands inside the layer that it adapts, so that the names of the layer's weights stay:
`layers.3.attention.wq.adapter.a`. B begins at zero: an adapter changes nothing before its first
update. Routers, embeddings, the output layer and indexers have none.
"""

from collections.abc import Iterable

import torch
from torch import nn

from titan_moe.config.job_config import Lora
from titan_moe.models.compressed_attention import BlockIndexer
from titan_moe.models.config import ModelConfig, matches
from titan_moe.models.decoder import ADAPTER, Decoder
from titan_moe.models.indexer import Indexer
from titan_moe.models.output import Output
from titan_moe.moe.experts import AdaptedOutputs, ExpertAdapter
from titan_moe.moe.layer import Experts
from titan_moe.moe.router import Router
from titan_moe.ops.low_rank import AdaptedLinear, Adapter

# Names of B in an adapter -> those of the weight that it adapts, in its layer, and of A.
_PAIRS = {
    "b": ("weight", "a"),
    "w1_b": ("w1", "w13_a"),
    "w2_b": ("w2", "w2_a"),
    "w3_b": ("w3", "w13_a"),
}


def adaptable(model: nn.Module) -> dict[str, nn.Linear | Experts]:
    """Returns the layers that may have an adapter by name: Linear layers, and stacks of experts."""
    left_out = {
        id(inside)
        for module in model.modules()
        if isinstance(module, Router | Indexer | BlockIndexer | Output)
        for inside in module.modules()
    }
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Experts) and id(module) not in left_out
    }


def adapt(model: nn.Module, config: Lora) -> None:
    """Adds adapters, without values yet, to the layers of a model that lora.targets name."""
    if config.rank is None:
        return
    for name, module in adaptable(model).items():
        if not any(matches(name, pattern) for pattern in config.targets):
            continue
        if isinstance(module, Experts):
            plain = module.compute
            gated = plain.activation.gated
            module.adapter = ExpertAdapter(config.rank, *module.w1.shape, gated=gated)
            module.compute = AdaptedOutputs(
                plain.activation, scale_inputs=plain.scale_inputs, scale=config.scale
            )
            continue
        outputs, inputs = module.weight.shape
        adapter = Adapter(config.rank, inputs, outputs, config.scale)
        model.set_submodule(name, AdaptedLinear(module, adapter))


def empty_model(config: ModelConfig, lora: Lora | None = None) -> Decoder:
    """Returns a whole model without memory, with its adapters if there are some."""
    with torch.device("meta"):
        model = Decoder(config)
        adapt(model, lora or Lora())
    return model


def pairs_of(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Returns the weights that adapters of these names belong to, each with the names of A and B:
    {"layers.3.attention.wq.weight": ("layers.3.attention.wq.adapter.a", ...)}."""
    pairs = {}
    for name in names:
        layer, _, own = name.partition(ADAPTER)
        if own in _PAIRS:
            weight, a = _PAIRS[own]
            pairs[f"{layer}.{weight}"] = (f"{layer}{ADAPTER}{a}", name)
    return pairs
