"""Forms of Hugging Face folders that hold the same model."""

from pathlib import Path

import torch
from transformers import Llama4Config, Llama4ForConditionalGeneration

from titan_moe.models.decoder import Decoder
from titan_moe.models.hf import model_of
from titan_moe.verify.parity.cases import cases
from titan_moe.verify.parity.check import load_folder

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
