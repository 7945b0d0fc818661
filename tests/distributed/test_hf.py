"""Hugging Face folders into models in any layout and out again, bit for bit."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.adapters import LORA, adapted, saved_adapters
from tests.support.gates import fitting
from tests.support.hf_folders import assert_same_bits, make_folder, read_folder, small_model
from tests.support.refusals import failure
from tests.support.saved_runs import plain_checkpointer
from tests.support.tiers import tiered
from titan_moe.checkpoint.hf import write
from titan_moe.checkpoint.hf.read import import_folder, load_hf
from titan_moe.checkpoint.tensors import MODEL, model_tensors
from titan_moe.config.job_config import JobConfig
from titan_moe.models.decoder import Decoder
from titan_moe.models.hf import HFModel, model_of
from titan_moe.models.registry import FAMILIES
from titan_moe.parallelize.parallelize import build_sharded_model
from titan_moe.parallelize.policies import make_plan
from titan_moe.runtime.files import step_folder
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.verify.layouts.layouts import apply_layout, parse

ALL_AXES = "dp_shard=2,tp=2,ep=2,etp=2"


def round_trip(model: HFModel, layout: str, folder: Path, dtype: str, **form: bool) -> Path:
    """Write a folder in a form, and take it through a layout; returns the export, whose tensors
    have the same bits."""
    source, target, ranks = folder / "in", folder / "out", parse(layout).world_size
    wanted = make_folder(source, model, getattr(torch, dtype), **form)
    run_on_ranks(through, ranks, model, layout, source, target, dtype)
    assert_same_bits(read_folder(target), wanted)
    return target


def parts_of(model: HFModel, layout: str, **tables: Any) -> list[Decoder]:
    """Returns this rank's parts of a model in a layout."""
    own = parse(layout)
    tables["model"] = {"name": model.family, "flavor": "gate"}
    tables["parallelism"] = {"module_fqns_per_model_part": None}
    plan = make_plan(apply_layout(JobConfig(), own, tables), model.config, own.world_size)
    return build_sharded_model(plan, torch.device("cpu")).parts


def through(model: HFModel, layout: str, source: Path, target: Path, dtype: str) -> None:
    """Load a folder into a sharded model, and export the model."""
    parts = parts_of(model, layout)
    tensors = {n.removeprefix(MODEL): t for n, t in model_tensors(parts).items()}
    load_hf(source, model, tensors)
    record = {"model": {"hf_assets_path": str(source)}}
    checkpointer = plain_checkpointer(target.parent, parts, model=model, job_record=record)
    checkpointer.save(1, {})
    # More files than ranks, and not as many for each of them.
    with mock.patch.multiple(write, LARGEST_FILE=40_000, LARGEST_PUBLISHED=0):
        saved = step_folder(checkpointer.folder, 1)
        write.export_checkpoint(saved, target, getattr(torch, dtype))


@pytest.mark.parametrize(
    "family, layout",
    tiered(
        [*product(FAMILIES, ["dp_shard=1"]), ("deepseek_v3", ALL_AXES)],
        slow=[*product(FAMILIES[1:], [ALL_AXES]), ("gpt_oss", "pp=2")],
        full=[
            (family, layout)
            for family, layout in product(FAMILIES, ["dp_replicate=2", "pp=2"])
            if (family, layout) != ("gpt_oss", "pp=2")
        ],
    ),
)
def test_round_trip_in_every_layout(family, layout, tmp_path):
    layout = fitting(family, layout)
    out = round_trip(small_model(family), layout, tmp_path, "bfloat16")
    assert len(list(out.glob("*.safetensors"))) > parse(layout).world_size
    assert not list(tmp_path.glob(".*"))
    assert (out / "tokenizer_config.json").read_text() == '{"eos_token": "<eos>"}'


@pytest.mark.parametrize("layout", tiered(["pp=2"], slow=[ALL_AXES]))
@pytest.mark.parametrize("family", tiered(["qwen3"], slow=["deepseek_v3"]))
def test_experts_stored_whole_and_float32(family, layout, tmp_path):
    round_trip(small_model(family), layout, tmp_path, "float32", fused=True, one_file=True)
    assert any("gate_up_proj" in name for name in read_folder(tmp_path / "in"))


def write_adapters(folder: Path) -> None:
    """Write random adapters of the model in `folder`/base as a PEFT folder."""
    step = saved_adapters(folder, *adapted(folder / "base"))
    write.export_checkpoint(step, folder / "in", torch.float32)


def begin_with(layout: str, base: Path, adapters: Path, target: Path) -> None:
    """Begin a run with the adapters of a PEFT folder, and export them."""
    model = model_of(base)
    lora = LORA.model_copy(update={"initial_load_path": str(adapters)}).model_dump()
    parts = parts_of(model, layout, lora=lora)
    record = {"lora": lora, "model": {"hf_assets_path": str(base)}}
    record["checkpoint"] = {"initial_load_path": None}
    keys = {"initial_load_in_hf": True, "async_mode": "disabled"}
    checkpointer = plain_checkpointer(target, parts, model=model, job_record=record, **keys)
    assert checkpointer.load() is None
    checkpointer.save(1, {})
    write.export_checkpoint(step_folder(checkpointer.folder, 1), target / "out", torch.float32)


@pytest.mark.parametrize(
    "family, layout",
    tiered(
        [("qwen3", "dp_shard=2,ep=2")],
        slow=[("gpt_oss", ALL_AXES), ("qwen3", "pp=2")],
        full=[("glm4_moe", ALL_AXES), ("mixtral", "dp_replicate=2")],
    ),
)
def test_adapters_in_and_out_in_every_layout(family, layout, tmp_path):
    plain = small_model(family)
    plain = replace(plain, config=replace(plain.config, num_mtp_layers=0))
    make_folder(tmp_path / "base", plain, torch.float32)
    run_on_ranks(write_adapters, 1, tmp_path)
    folders = tmp_path / "base", tmp_path / "in", tmp_path / "run"
    run_on_ranks(begin_with, parse(layout).world_size, layout, *folders)
    assert_same_bits(read_folder(tmp_path / "run" / "out"), read_folder(tmp_path / "in"))


def export_wrong(source: Path, target: Path) -> None:
    """Export with a mistake in the files of the last rank alone."""
    save = write.save

    def wrong(tensors: dict[str, torch.Tensor], path: Path, facts: dict[str, str]) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            tensors = {name: tensor + 1 for name, tensor in tensors.items()}
        save(tensors, path, facts)

    with mock.patch.object(write, "save", wrong):
        assert "has other values than" in failure(write.export_checkpoint, source, target, None)


def test_all_ranks_refuse_what_one_of_them_wrote_wrong(tmp_path):
    make_folder(tmp_path / "in", small_model("qwen3", 2), torch.bfloat16)
    run_on_ranks(import_folder, 2, tmp_path / "in", tmp_path / "imported", torch.float32)
    run_on_ranks(export_wrong, 2, tmp_path / "imported", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"in", "imported"}
