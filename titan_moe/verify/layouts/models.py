"""Models for layouts of many ranks: one per family, of shapes that every layout can cut.

They are laid out and never trained, so they may be as wide as published models; only their depth is
cut, to a layer per pipeline stage.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch

from titan_moe.config.job_config import JobConfig
from titan_moe.models.config import GQAConfig, ModelConfig
from titan_moe.models.decoder import Decoder
from titan_moe.models.registry import model_config
from titan_moe.verify.layouts.layouts import Layout, apply_layout, layout_tables

SEQ_LEN = 4096


@dataclass(frozen=True)
class LayoutModel:
    """A family's configuration in one layout."""

    job: JobConfig
    config: ModelConfig
    stages: tuple[tuple[str, ...], ...]
    """The modules of each pipeline stage; empty without a pipeline."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every parameter of the whole model."""
        return _shapes(self.config)


def layout_models(layout: Layout) -> dict[str, LayoutModel]:
    """Returns a model of each family."""
    return {
        "deepseek_v3": _layout_model("deepseek_v3", _published(), layout),
        "qwen3": _layout_model("qwen3", _uneven(layout.ep), layout),
    }


def _published() -> ModelConfig:
    """DeepSeek-V3: its 128 heads, 256 experts, widths and vocabulary divide by 64."""
    return replace(model_config("deepseek_v3", "671B"), num_dense_layers=1)


def _uneven(ep: int) -> ModelConfig:
    """Sizes that tp and ep divide where they cut, and that hardly anything else divides.

    Of 191 rows the last rank has fewer than the others; of 3 experts a rank, data parallelism of
    four ranks or more must cut another dim; norms of 24 leave some of 32 ranks with nothing.
    """
    config = model_config("qwen3", "gate")
    assert config.moe is not None
    return replace(
        config,
        dim=191,
        vocab_size=192,
        max_seq_len=SEQ_LEN,
        attention=GQAConfig(
            num_heads=128, num_kv_heads=64, head_dim=24, qk_norm="learned", bias=True
        ),
        moe=replace(config.moe, num_experts=3 * ep, hidden_dim=192),
    )


def _layout_model(family: str, config: ModelConfig, layout: Layout) -> LayoutModel:
    local = layout_tables(layout)["training"]["local_batch_size"]
    tables = {
        "model": {"name": family, "flavor": "gate"},
        "training": {"seq_len": SEQ_LEN, "global_batch_size": local * layout.data_ranks},
        # With one layer per stage, the split of _stages is the only one.
        "parallelism": {"module_fqns_per_model_part": None},
    }
    job = apply_layout(JobConfig(), layout, tables)
    num_layers = max(config.num_dense_layers + 1, layout.num_stages)
    return LayoutModel(job, replace(config, num_layers=num_layers), _stages(layout))


@cache
def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Decoder(config).named_parameters()}


def _stages(layout: Layout) -> tuple[tuple[str, ...], ...]:
    if layout.pp == 1:
        return ()
    parts = [[f"layers.{stage}"] for stage in range(layout.num_stages)]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return tuple(tuple(part) for part in parts)
