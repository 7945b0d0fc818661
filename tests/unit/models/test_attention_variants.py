"""A further attention variant that was forgotten somewhere is an error that names it there."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from tests.support.refusals import refusal
from titan_moe.config.job_config import JobConfig
from titan_moe.models.config import ModelConfig
from titan_moe.models.decoder import Decoder
from titan_moe.models.hf import HFModel
from titan_moe.models.registry import FAMILIES, model_config
from titan_moe.models.stats import part_flops, part_sizes
from titan_moe.parallelize.memory import memory
from titan_moe.parallelize.policies import make_plan


@dataclass(frozen=True)
class LinearAttention:
    """Dimensions that nothing but the configuration knows."""

    num_heads: int = 4
    num_kv_heads: int = 4
    rope_dim: int = 8
    qk_dim: int = 8
    v_dim: int = 8
    rope: None = None
    local: None = None
    sinks: bool = False


def build(config: ModelConfig) -> None:
    with torch.device("meta"):
        Decoder(config)


def estimate(config: ModelConfig) -> None:
    memory(make_plan(JobConfig(), config, 1))


@pytest.mark.parametrize("use", [build, part_sizes, part_flops, estimate])
def test_unknown_attention_variant_is_named(use: Callable[[ModelConfig], object]) -> None:
    with pytest.raises(TypeError, match="LinearAttention"):
        use(replace(model_config("qwen3", "gate"), attention=LinearAttention()))


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_without_hugging_face_names_is_refused_in_one_line(family: str) -> None:
    config = replace(model_config(family, "gate"), attention=LinearAttention())
    kind = type(model_config(family, "gate").attention).__name__
    assert refusal(HFModel(family, config).settings).startswith(
        f"the Hugging Face form of {family} has no place for attention of a LinearAttention, "
        f"only of a {kind}: add it to titan_moe/models/{family}/hf.py"
    )
