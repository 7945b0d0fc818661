"""Gates of the families, and samples of layouts."""

import random
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from tests.support.paths import DEBUG_CONFIGS
from titan_moe.config.job_config import OptimizerGroup
from titan_moe.config.parse import load_job
from titan_moe.models.config import CompressedConfig
from titan_moe.models.registry import FAMILIES, model_config
from titan_moe.verify.gradients.gate import Gate
from titan_moe.verify.layouts.covering import cover_options, cover_pairs
from titan_moe.verify.layouts.layouts import OPTIONS, Tables, legal_layouts, parse, with_options

KINDS: Mapping[str, Tables] = {
    "AdamW": {},
    "Muon": {"optimizer": {"name": "Muon"}},
    "narrow": {"optimizer": {"name": "Muon", "state_dtype": "bfloat16"}},
    "overlap": {"parallelism": {"expert_parallel_overlap": True}},
    "through the host": {"comm": {"share_gpus": True}},
    "two depths": {"model": {"num_mtp_layers": 2}},
    "warm-up": {"training": {"indexer_stage": "dense", "max_norm": 0.01}},
    "conversations": {"training": {"dataset_format": "messages"}},
    "adapters": {"lora": {"rank": 3}},
    "compiled adapters": {
        "lora": {"rank": 3},
        "compile": {"enable": True, "backend": "aot_eager"},
    },
    "frozen": {
        "training": {"freeze": ["router", "layers.0", "*.wk*"]},
        "optimizer": {"groups": [OptimizerGroup(pattern="experts", lr=0.1, weight_decay=0.5)]},
    },
    "group of a tied weight": {
        "optimizer": {"groups": [OptimizerGroup(pattern="output", lr=0.1, weight_decay=0.5)]}
    },
    "shared keys": {"model": {"flavor": "gate_shared"}},
    "warm-up of shared keys": {
        "model": {"flavor": "gate_shared"},
        "training": {"indexer_stage": "dense", "max_norm": 0.01},
    },
    "compiled": {"compile": {"enable": True, "backend": "aot_eager"}},
    "inductor": {"compile": {"enable": True, "backend": "inductor"}},
    "compiled halves": {
        "compile": {"enable": True, "backend": "aot_eager"},
        "parallelism": {"expert_parallel_overlap": True},
    },
}
"""Keys of a gate besides its family's."""


class Gates(Protocol):
    """Makes each gate once."""

    def __call__(self, family: str, kind: str = "AdamW") -> Gate: ...


def gate_of(family: str, folder: Path, kind: str = "AdamW") -> Gate:
    torch.set_num_threads(1)
    job = load_job(["--job.config_file", str(DEBUG_CONFIGS / f"gate_{family}.toml")])
    # As large as leaves several on every rank: a fifth of a gate's time is that of chunks of 5.
    job = job.with_values(training={"loss_chunk_size": 9})
    return Gate(job.with_values(**KINDS[kind]), folder)


def fitting(family: str, text: str) -> str:
    """A layout that the family's attention has: with an indexer it gathers keys under cp; whole
    sequences and heads, as compressed blocks need, go to as many ranks of dp_shard."""
    config = model_config(family, "gate")
    if isinstance(config.attention, CompressedConfig):
        cut = parse(text)
        return str(replace(cut, dp_shard=cut.dp_shard * cut.cp * cut.tp, cp=1, tp=1))
    sparse = config.indexer is not None
    return re.sub("cp_method=[a-z]+", "cp_method=allgather", text) if sparse else text


def cover(worlds: list[int], count: int, seed: int) -> list[str]:
    """A sample as text, of which the smaller worlds give what they can."""
    layouts = [layout for world in worlds for layout in legal_layouts(world)]
    return [str(layout) for layout in cover_options(cover_pairs(layouts, count, seed))]


def drawn(seed: int) -> str:
    """A layout of 3 to 8 ranks with options, all drawn at random; a gate may refuse it."""
    chance = random.Random(seed)
    legal = legal_layouts(chance.choice([3, 4, 6, 8]))
    options = {option: chance.choice(values) for option, values in OPTIONS.items()}
    return str(with_options(chance.choice(legal), **options))


SAMPLE = cover([2, 4, 8], 30, seed=22)
SMALL = cover([4], 10, seed=0)
"""The default tier's layouts: as few ranks and layouts as every pair of axes needs."""
OTHERS = [family for family in FAMILIES if family != "deepseek_v3"]
