"""Forms of Hugging Face folders that hold the same model."""

from pathlib import Path

import torch
from transformers import (
    Llama4Config,
    Llama4ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from titan_moe.models.decoder import Decoder
from titan_moe.models.hf import model_of
from titan_moe.verify.parity.cases import cases
from titan_moe.verify.parity.check import distance, load_folder

_TINY_VISION = {
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vision_output_dim": 16,
    "image_size": 16,
    "patch_size": 8,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}


def test_llama4_is_read_out_of_the_model_that_also_sees(tmp_path: Path):
    (case,) = (case for case in cases() if str(case) == "llama4: plain")
    whole = Llama4ForConditionalGeneration(
        Llama4Config(text_config=case.settings, vision_config=_TINY_VISION)
    )
    whole.save_pretrained(tmp_path / "whole")
    whole.language_model.save_pretrained(tmp_path / "text")
    models = []
    for folder in (tmp_path / "whole", tmp_path / "text"):
        found = model_of(folder)
        models.append(Decoder(found.config))
        load_folder(models[-1], found, folder)
    first, second = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(parameter, second[name]) for name, parameter in first.items())
    assert torch.equal(first["output.weight"], whole.get_submodule("language_model.lm_head").weight)


def test_qwen3_5_is_read_out_of_the_model_that_also_sees(tmp_path: Path):
    (case,) = (case for case in cases() if str(case) == "qwen3_5_moe: plain")
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {"out_hidden_size": case.settings["hidden_size"], "num_position_embeddings": 16}
    whole = Qwen3_5MoeForConditionalGeneration(
        Qwen3_5MoeConfig(text_config=case.settings, vision_config=vision)
    )
    whole.save_pretrained(tmp_path)
    found = model_of(tmp_path)
    model = Decoder(found.config)
    load_folder(model, found, tmp_path)
    tokens = torch.randint(0, 96, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = whole.eval()(input_ids=tokens, use_cache=False).logits
        assert distance(model.eval()(tokens), theirs) < 1e-5
