"""Adapters: `peft` opens what we write and computes the same, and we what it writes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from tests.support.adapters import LORA, adapted, adapters_of, saved_adapters, small_adapters
from tests.support.hf_folders import assert_same_bits, read_folder
from tests.support.refusals import failure
from tests.support.saved_runs import plain_checkpointer, saved_model
from titan_moe.checkpoint.hf.merge import merge
from titan_moe.checkpoint.hf.peft import SETTINGS, WEIGHTS, read_adapters
from titan_moe.checkpoint.hf.write import export_checkpoint
from titan_moe.config.job_config import Lora
from titan_moe.models.decoder import Decoder
from titan_moe.verify.parity.check import BOUNDS, cases, distance
from titan_moe.verify.parity.oracle import FirstOfEqual, Oracle, computing_in

PLAIN = {case.family: case for case in cases() if case.option == "plain"}
# Layers with tensors of their own: peft has one A for projections that share a tensor.
SEPARATE = ["*.attention.w?", "out_proj", "shared_experts", "experts"]
LATENT = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
HEADS = ["q_proj", "k_proj", "v_proj", "o_proj"]
# Families whose experts `peft` adapts as stacks, and not each projection of them.
STACKED = ["qwen3", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "llama4"]
STACKS = ["gate_up_proj", "down_proj"]


@torch.no_grad()
def _same(ours: Decoder, theirs: PeftModel, dtype: torch.dtype) -> None:
    tokens = torch.randint(0, ours.config.vocab_size, (2, 12))
    with computing_in(dtype), FirstOfEqual():
        found = ours.eval()(tokens)
        wanted = theirs.eval()(input_ids=tokens, use_cache=False).logits
        with theirs.disable_adapter():
            without = theirs(input_ids=tokens, use_cache=False).logits
    assert found.dtype == wanted.dtype == dtype
    assert distance(found, wanted) <= BOUNDS[dtype] and distance(without, wanted) > 0.1


def _adapted_oracle(family: str, lora: Lora, folder: Path):
    """Returns a model of transformers, saved in `folder`, and ours of it with random adapters."""
    oracle = Oracle(PLAIN[family].settings, 3, PLAIN[family].expert_scale)
    oracle.model.save_pretrained(folder)
    return oracle.model, *adapted(folder, lora)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("family", [family for family in PLAIN if family != "step3p7"])
def test_peft_computes_what_we_write(family, dtype, tmp_path):
    shares = family in ("qwen3_next", "qwen3_5_moe", "nemotron_h")
    # `peft` takes no out_proj of Mamba's.
    targets = [name for name in SEPARATE if family != "nemotron_h" or name != "out_proj"]
    lora = LORA.model_copy(update={"targets": targets} if shares else {})
    with computing_in(dtype):
        base, ours, model = _adapted_oracle(family, lora, tmp_path / "base")
        step = saved_adapters(tmp_path, ours, model, lora, base=tmp_path / "base")
    export_checkpoint(step, tmp_path / "out", dtype)
    settings = json.loads((tmp_path / "out" / SETTINGS).read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / "base")
    with computing_in(dtype):
        theirs = PeftModel.from_pretrained(base, tmp_path / "out")
    _same(ours, theirs, dtype)


@pytest.mark.parametrize("is_checkpoint", [False, True])
def test_the_base_is_a_hugging_face_folder_wherever_peft_is_started(
    is_checkpoint: bool, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    ours, model, _ = small_adapters(tmp_path, "qwen3", 1)
    step = saved_adapters(tmp_path, ours, model, base=Path("base"))
    if is_checkpoint:
        (tmp_path / "base/manifest.json").write_text("{}")
    export_checkpoint(step, tmp_path / "out", None)
    base = json.loads((tmp_path / "out" / SETTINGS).read_text())["base_model_name_or_path"]
    assert base == (None if is_checkpoint else f"{tmp_path}/base")


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("family", STACKED)
def test_we_read_what_peft_writes(family, dtype, tmp_path):
    lora = Lora(rank=3, alpha=6, rank_stabilised=True, targets=["attention", "experts"])
    with computing_in(dtype):
        base, ours, model = _adapted_oracle(family, lora, tmp_path / "base")
        settings = LoraConfig(
            r=3,
            lora_alpha=6,
            use_rslora=True,
            target_modules=LATENT if family == "deepseek_v3" else HEADS,
            target_parameters=STACKS,
            init_lora_weights=False,
        )
        theirs = get_peft_model(base, settings)
    theirs.save_pretrained(tmp_path / "theirs")
    own, found = adapters_of(ours), read_adapters(tmp_path / "theirs", model, lora)
    assert found.keys() == own.keys()
    for name, tensor in own.items():
        tensor.data.copy_(found[name])
    _same(ours, theirs, dtype)


def test_frozen_adapters_are_exported_too(tmp_path):
    ours, model, step = small_adapters(tmp_path, "qwen3", 1)
    export_checkpoint(step, tmp_path / "out", torch.float32)
    for name, tensor in adapters_of(ours).items():
        tensor.requires_grad_(name.endswith("b"))
    keys = {"job_record": {"lora": LORA.model_dump()}, "export_dtype": "float32"}
    checkpointer = plain_checkpointer(tmp_path / "rests", ours, model=model, **keys)
    checkpointer.save(1, {})
    checkpointer.export(1)
    out = read_folder(tmp_path / "rests" / "checkpoint" / "step-1-hf")
    assert_same_bits(out, read_folder(tmp_path / "out"))


def test_adapters_of_a_seed_are_left_out(tmp_path):
    """They change nothing: the export is the model that they stand in, and so is a merge's base."""
    ours, model, step = small_adapters(tmp_path, "qwen3", 1)
    seed = saved_model(tmp_path / "seed", ours, model=model, create_seed_checkpoint=True)
    export_checkpoint(seed, tmp_path / "out", torch.float32)
    base = read_folder(tmp_path / "base")
    assert_same_bits(read_folder(tmp_path / "out"), base)
    merge(step, tmp_path / "merged", torch.float32, seed)
    assert read_folder(tmp_path / "merged").keys() == base.keys()


# --- what is refused ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A PEFT folder of ours, and its model."""
    folder = tmp_path_factory.mktemp("peft")
    _, model, step = small_adapters(folder, "qwen3", 1)
    export_checkpoint(step, folder / "out", torch.float32)
    return folder / "out", model


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def as_before_0_19(tensors):
    for a in [name for name in tensors if ".experts." in name and "lora_A" in name]:
        b = a.replace("_A", "_B")
        tensors[a], tensors[b] = tensors[b].mT.contiguous(), tensors[a].mT.contiguous()


OTHERS = {
    " tensors of another shape: ": as_before_0_19,
    "r=8 ([lora] makes it 4)": {"r": 8},
    "lora_alpha=16 ([lora] makes it 6)": {"lora_alpha": 16},
    "use_rslora=True": {"use_rslora": True},
    "peft_type='IA3'": {"peft_type": "IA3"},
    "bias='all'": {"bias": "all"},
    "use_dora=True is not supported": {"use_dora": True},
    "modules_to_save=['lm_head'] is not supported": {"modules_to_save": ["lm_head"]},
    "'pissa' (it may have changed the base)": {"init_lora_weights": "pissa"},
    "rank_pattern={'q_proj': 2} (all layers must have 4)": {"rank_pattern": {"q_proj": 2}},
    f"1 tensor missing: {Q}": lambda x: x.pop(Q),
    f"1 tensor of no use to this model: {Q}s": lambda x: x.update({Q + "s": x[Q].clone()}),
    f"1 tensor of another shape: {Q} [": lambda x: x.update({Q: x[Q].mT.contiguous()}),
    f"{Q} holds no floating-point numbers": lambda x: x.update({Q: x[Q].long()}),
    f"in/{WEIGHTS}: {Q} has values that are NaN or infinite in float32: ": lambda x: x[Q][1].div_(
        0
    ),
}


@pytest.mark.parametrize("words", OTHERS)
def test_other_adapters_are_one_line(words, written, tmp_path):
    """A folder with other settings, or with other tensors, is refused."""
    folder, model = written
    shutil.copytree(folder, tmp_path / "in")
    if isinstance(change := OTHERS[words], dict):
        settings = json.loads((folder / SETTINGS).read_text())
        (tmp_path / "in" / SETTINGS).write_text(json.dumps(settings | change))
    else:
        change(tensors := load_file(folder / WEIGHTS))
        save_file(tensors, tmp_path / "in" / WEIGHTS)
    assert words in failure(read_adapters, tmp_path / "in", model, LORA)


def test_no_peft_folder_is_one_line(written, tmp_path):
    folder, model = written
    line = failure(read_adapters, tmp_path, model, LORA)
    assert f"{tmp_path} is no PEFT folder: {SETTINGS}: No such file" in line
    shutil.copy(folder / WEIGHTS, tmp_path)
    (tmp_path / SETTINGS).write_text("[]")
    line = failure(read_adapters, tmp_path, model, LORA)
    assert f"{tmp_path} is no PEFT folder: {SETTINGS}: 'list' object" in line


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("qwen3_next", "`peft` has one A for all rows of model.layers.0.linear_attn.in_proj_qkvz"),
        ("deepseek_v3", "`peft` has no multi-token prediction"),
    ],
)
def test_what_peft_cannot_hold_is_refused(family, words, tmp_path):
    _, _, step = small_adapters(tmp_path, family, 2)
    line = failure(export_checkpoint, step, tmp_path / "out", torch.float32)
    assert words in line and "titan-moe hf merge" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [float("nan"), 1e5])
def test_adapters_that_are_not_finite_are_not_exported(value, tmp_path):
    ours, model, _ = small_adapters(tmp_path, "qwen3", 1)
    name, tensor = next(iter(adapters_of(ours).items()))
    tensor.data[0, 0] = value
    step = saved_adapters(tmp_path / "bad", ours, model)
    line = failure(export_checkpoint, step, tmp_path / "out", torch.float16)
    assert f"{name} has values that are NaN or infinite in float16: export a wider" in line
    assert not (tmp_path / "out").exists()
