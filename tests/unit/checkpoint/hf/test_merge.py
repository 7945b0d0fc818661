"""Adapters and their base as one folder: sums by hand, logits of transformers, and refusals."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.adapters import LORA, adapted, adapters_of, saved_adapters, small_adapters
from tests.support.hf_folders import assert_same_bits, make_folder, read_folder, small_model
from tests.support.refusals import failure
from titan_moe.checkpoint.hf import merge as merging
from titan_moe.checkpoint.hf.merge import merge
from titan_moe.checkpoint.hf.read import import_folder, load_alone
from titan_moe.models.lora import pairs_of
from titan_moe.verify.parity.check import EXPORT_BOUND, cases, distance, logits_difference
from titan_moe.verify.parity.oracle import FirstOfEqual, Oracle, computing_in

CPU = torch.device("cpu")
PLAIN = {case.family: case for case in cases() if case.option == "plain"}
FAMILIES = ["qwen3", "gpt_oss", "deepseek_v3", "llama4", "qwen3_next", "mixtral", "glm4_moe"]


def _by_hand(base, adapters, dtype):
    """Weights of our names with each product added in float64, rounded once."""
    sums = dict(base)
    for name, (a, b) in pairs_of(adapters).items():
        product = adapters[b].double() @ adapters[a].double()
        sums[name] = (base[name].double() + LORA.scale * product).to(dtype).float()
    return sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_folder_is_the_sum_by_hand_to_the_bit(family, dtype, tmp_path, monkeypatch):
    """The base is a Hugging Face folder, then a checkpoint; both are cut in small parts."""
    monkeypatch.setattr(merging, "LARGEST_CHUNK", 700)
    make_folder(tmp_path / "base", small_model(family, num_layers=3), torch.bfloat16)
    import_folder(tmp_path / "base", tmp_path / "imported", torch.float32)
    ours, model = adapted(tmp_path / "base")
    step = saved_adapters(tmp_path, ours, model, LORA, base=tmp_path / "base")
    merge(step, tmp_path / "out", dtype)
    base, found = (
        load_alone(tmp_path / name, dtype=torch.float32, device=CPU).model.state_dict()
        for name in ("base", "out")
    )
    adapters = {n: x.detach() for n, x in adapters_of(ours).items() if not n.startswith("mtp.")}
    assert_same_bits(found, _by_hand(base, adapters, dtype))
    assert logits_difference(tmp_path / "out") <= EXPORT_BOUND
    merge(step, tmp_path / "again", dtype, tmp_path / "imported")
    assert_same_bits(read_folder(tmp_path / "again"), read_folder(tmp_path / "out"))


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe"])
def test_transformers_computes_of_a_merged_folder_what_adapters_do(family, tmp_path):
    with computing_in(torch.float64):
        Oracle(PLAIN[family].settings, 3).model.save_pretrained(tmp_path / "base")
        ours, model = adapted(tmp_path / "base")
        step = saved_adapters(tmp_path, ours, model, base=tmp_path / "base")
    merge(step, tmp_path / "out", torch.float64)
    tokens_BS = torch.randint(0, model.config.vocab_size, (2, 12))
    how = {"dtype": torch.float64, "attn_implementation": "eager"}
    with computing_in(torch.float64), FirstOfEqual():
        theirs = AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", experts_implementation="eager", **how
        )
        logits_BSV = theirs.eval()(tokens_BS, use_cache=False).logits
        assert distance(logits_BSV, ours.eval()(tokens_BS)) <= 1e-12


@pytest.fixture
def step(tmp_path):
    """A checkpoint of adapters."""
    return small_adapters(tmp_path, "qwen3", 2)[-1]


def test_what_cannot_be_merged_is_one_line(step, tmp_path):
    make_folder(tmp_path / "three", small_model("qwen3", num_layers=3), torch.float32)
    make_folder(tmp_path / "other", small_model("mixtral", num_layers=2), torch.float32)
    import_folder(tmp_path / "three", tmp_path / "whole", torch.float32)
    path = tmp_path / "base" / "model.safetensors"
    save_file({name: x + (x == x.max()) for name, x in load_file(path).items()}, path)
    for checkpoint, base, words in (
        (step, None, "does not name the weights that it began with: give --base"),
        (step, "three", f"three is not the base of {step}: num_layers 2 (there 3)"),
        (step, "other", f"other is not the base of {step}: a mixtral model, not qwen3"),
        (step, step, "holds adapters, and no model"),
        (step, "base", f"{step} has adapters of other weights: name theirs with --base"),
        (tmp_path / "whole", None, "holds no adapters: titan-moe hf export"),
    ):
        named = base and tmp_path / base
        assert words in failure(merge, checkpoint, tmp_path / "out", torch.float32, named)
    assert not (tmp_path / "out").exists()


def test_adapters_alone_are_no_model(step):
    line = failure(lambda: load_alone(step, dtype=torch.float32, device=CPU))
    assert "holds adapters, and no model: titan-moe hf merge makes one of them" in line
