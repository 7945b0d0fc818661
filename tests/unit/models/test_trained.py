"""Patterns of names, and what they leave to train."""

import pytest
import torch

from tests.support.tiny import make_job, tiny
from titan_moe.config.job_config import JobConfig
from titan_moe.models.config import matches
from titan_moe.models.decoder import Decoder
from titan_moe.models.registry import model_config
from titan_moe.models.trained import pattern_lines, sizes_by_name, trained, unknown_patterns

NAME = "layers.3.moe.router.gate.weight"


@pytest.mark.parametrize(
    "pattern, fits",
    [
        ("router", True),
        ("layers.3", True),
        ("layers.3.*", True),
        ("*.router.*", True),
        (NAME, True),
        ("layers.?.moe.*.weight", True),
        ("rout", False),
        ("ayers.3", False),
        ("layers", True),
        ("layers.30", False),
        ("*.router", False),
    ],
)
def test_pattern_matches_a_name_its_part_or_by_wildcards(pattern: str, fits: bool):
    assert matches(NAME, pattern) is fits


def names_of(family: str, flavor: str) -> list[str]:
    with torch.device("meta"):
        model = Decoder(model_config(family, flavor))
    return [name for name, _ in model.named_parameters()]


TABLE = {"tok_embeddings.weight", "mtp.layers.0.tok_embeddings.weight"}


@pytest.mark.parametrize(
    "family, pattern, tied",
    [
        ("deepseek_v3", "mtp.layers.0.tok_embeddings", TABLE),
        ("deepseek_v3", "tok_embeddings", TABLE),
        ("deepseek_v3", "*embeddings*", TABLE),
        ("deepseek_v3", "output", set()),
        ("deepseek_v3", "mtp", set()),
        ("deepseek_v3", "mtp.layers.0", set()),
        ("deepseek_v3", "mtp.layers.*", set()),
        ("deepseek_v3", "layers.0", set()),
        ("deepseek_v3", "layers", set()),
        ("qwen3", "output", {"tok_embeddings.weight", "output.weight"}),
        ("qwen3", "tok_embeddings.weight", {"tok_embeddings.weight", "output.weight"}),
    ],
)
def test_pattern_means_all_copies_of_a_tied_weight_or_none(
    family: str, pattern: str, tied: set[str]
):
    config, names = model_config(family, "gate"), names_of(family, "gate")
    job = make_job(family, training={"freeze": [pattern]})
    frozen = set(names) - trained(names, config, job.training, job.lora)
    assert {name for name in frozen if "embeddings" in name or name in tied} == tied
    of_blocks = {name for name in names if name.startswith("mtp.")} - TABLE
    assert bool(frozen & of_blocks) is (pattern in ("mtp", "mtp.layers.0", "mtp.layers.*"))


def test_start_says_what_each_pattern_takes():
    config = model_config("deepseek_v3", "gate")
    groups = [{"pattern": "router", "lr": 1.0}, {"pattern": "moe", "lr": 2.0}]
    tables = {"training": {"freeze": ["layers.1"]}, "optimizer": {"groups": groups}}
    job = make_job("deepseek_v3", **tables)
    first, *others = pattern_lines(config, job.training, job.lora, job.optimizer.groups)
    assert first.startswith("training.freeze=layers.1 freezes layers.*.attention") and (
        "mtp" not in first and "layers.*.moe.router.gate.weight (1)" in first
    )
    assert others[0] == (
        "optimizer.groups.pattern=router takes layers.*.moe.router.gate.weight (6), "
        "mtp.layers.*.block.moe.router.gate.weight (1)"
    )
    assert "router" not in others[1].partition("takes")[2] and "experts.w1 (1)" in others[1]


def unknown(job: JobConfig) -> list[str]:
    return unknown_patterns(tiny(job), job.training, job.lora, job.optimizer.groups)


@pytest.mark.parametrize(
    "tables, line",
    [
        ({"training": {"freeze": ["router", "rooter"]}}, "training.freeze=rooter matches nothing"),
        ({"optimizer": {"groups": [{"pattern": "expert"}]}}, "nearest are experts, shared_experts"),
        ({"lora": {"rank": 2, "targets": ["router"]}}, "=router matches no layer that can have an"),
        ({"training": {"freeze": ["*"]}}, "training.freeze=* leave nothing that trains"),
        ({"lora": {"rank": 2}, "training": {"freeze": ["adapter"]}}, "nothing that trains: freeze"),
    ],
)
def test_a_pattern_without_a_match_is_refused_with_the_nearest_names(tables: dict, line: str):
    (found,) = unknown(make_job("deepseek_v3", **tables))
    assert line in found


@pytest.mark.parametrize("tables", [{}, {"lora": {"rank": 2}}, {"training": {"freeze": ["moe"]}}])
def test_sizes_by_name_count_the_parameters(tables: dict):
    job = make_job("deepseek_v3", **tables)
    assert unknown(job) == []
    whole, part = sizes_by_name(tiny(job), job.training, job.lora)
    assert whole.keys() == part.keys()
    adapted = "lora" in tables
    assert (whole == part) is (not tables)
    assert any(size.routed for size in part.values()) is (not tables or adapted)
