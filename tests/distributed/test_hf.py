"""Hugging Face folders into models in any layout and out again, bit for bit."""

from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.support.hf_folders import assert_same_bits, make_folder, read_folder, small_model
from tests.support.tiers import tiered
from titan_moe.checkpoint.checkpointer import Checkpointer
from titan_moe.checkpoint.hf import write
from titan_moe.checkpoint.hf.read import load_hf
from titan_moe.checkpoint.tensors import MODEL, model_tensors
from titan_moe.config.job_config import Checkpoint, JobConfig
from titan_moe.distributed.parallelize import build_sharded_model
from titan_moe.models.hf import HFModel
from titan_moe.models.registry import FAMILIES
from titan_moe.runtime.files import step_folder
from titan_moe.runtime.ranks import run_on_ranks

LAYOUTS = {
    "one rank": {},
    "replicas": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1},
    "dp, tp, ep, etp": {
        "data_parallel_shard_degree": 2,
        "tensor_parallel_degree": 2,
        "expert_parallel_degree": 2,
        "expert_tensor_parallel_degree": 2,
    },
    "pp": {"pipeline_parallel_degree": 2},
}
RANKS = {"one rank": 1, "replicas": 2, "dp, tp, ep, etp": 4, "pp": 2}


def through(model: HFModel, layout: str, source: Path, target: Path, dtype: str) -> None:
    """Load a folder into a sharded model, and export the model."""
    job = JobConfig.model_validate(
        {
            "model": {"name": model.family, "flavor": "gate"},
            "training": {"local_batch_size": 2, "seq_len": 32},
            "parallelism": LAYOUTS[layout],
            "activation_checkpoint": {"mode": "none"},
        }
    )
    cpu, world_size = torch.device("cpu"), RANKS[layout]
    sharded = build_sharded_model(job, model.config, device=cpu, world_size=world_size)
    tensors = {n.removeprefix(MODEL): t for n, t in model_tensors(sharded.parts).items()}
    load_hf(source, model, tensors)
    checkpointer = Checkpointer(
        Checkpoint(enable=True),
        target.parent,
        modules=sharded.parts,
        optimizer=None,
        job_record={"model": {"hf_assets_path": str(source)}},
        merge_data=lambda states: {},
        model=model,
    )
    checkpointer.save(1, {})
    # More files than ranks, and not as many for each of them.
    with mock.patch.object(write, "LARGEST_FILE", 40_000):
        saved = step_folder(checkpointer.folder, 1)
        write.export_checkpoint(saved, target, getattr(torch, dtype))


@pytest.mark.parametrize(
    "family, layout",
    tiered(
        [*product(FAMILIES, ["one rank"]), ("deepseek_v3", "dp, tp, ep, etp")],
        slow=[*product(FAMILIES[1:], ["dp, tp, ep, etp"]), ("gpt_oss", "pp")],
        full=[
            (family, layout)
            for family, layout in product(FAMILIES, ["replicas", "pp"])
            if (family, layout) != ("gpt_oss", "pp")
        ],
    ),
)
def test_round_trip_in_every_layout(family, layout, tmp_path):
    model = small_model(family)
    wanted = make_folder(tmp_path / "in", model, torch.bfloat16)
    paths = tmp_path / "in", tmp_path / "out"
    run_on_ranks(through, RANKS[layout], model, layout, *paths, "bfloat16")
    assert_same_bits(read_folder(tmp_path / "out"), wanted)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > RANKS[layout]
    assert not list(tmp_path.glob(".*"))
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == '{"eos_token": "<eos>"}'


@pytest.mark.parametrize("layout", tiered(["pp"], slow=["dp, tp, ep, etp"]))
@pytest.mark.parametrize("family", tiered(["qwen3"], slow=["deepseek_v3"]))
def test_experts_stored_whole_and_float32(family, layout, tmp_path):
    model = small_model(family)
    wanted = make_folder(tmp_path / "in", model, torch.float32, fused=True, num_files=1)
    assert any("gate_up_proj" in name for name in read_folder(tmp_path / "in"))
    paths = tmp_path / "in", tmp_path / "out"
    run_on_ranks(through, RANKS[layout], model, layout, *paths, "float32")
    assert_same_bits(read_folder(tmp_path / "out"), wanted)
