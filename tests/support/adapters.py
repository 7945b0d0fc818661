"""Models with random adapters, and checkpoints of them."""

from pathlib import Path

import torch
from torch import Tensor

from tests.support.hf_folders import make_folder, small_model
from tests.support.saved_runs import saved_model
from titan_moe.config.job_config import Lora
from titan_moe.models.attention import plain_core
from titan_moe.models.decoder import ADAPTER, Decoder
from titan_moe.models.hf import HFModel, model_of
from titan_moe.models.lora import adapt
from titan_moe.verify.parity.check import load_folder

LORA = Lora(rank=4, alpha=6)


def adapted(folder: Path, lora: Lora = LORA) -> tuple[Decoder, HFModel]:
    """Returns the model of a Hugging Face folder with random adapters."""
    model = model_of(folder)
    ours = Decoder(model.config, plain_core(model.config, mask_documents=True))
    load_folder(ours, model, folder)
    adapt(ours, lora)
    generator = torch.Generator().manual_seed(0)
    for tensor in adapters_of(ours).values():
        tensor.data.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    return ours, model


def adapters_of(model: Decoder) -> dict[str, Tensor]:
    return {name: each for name, each in model.named_parameters() if ADAPTER in name}


def saved_adapters(
    folder: Path, adapted: Decoder, model: HFModel, lora: Lora = LORA, base: Path | None = None
) -> Path:
    """Saves a checkpoint of a model's adapters in `folder`, as a run from `base` does."""
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_(ADAPTER in name)
    dtype = str(adapted.norm.weight.dtype).removeprefix("torch.")
    tables = {
        "lora": lora.model_dump(mode="json"),
        "training": {"dtype": dtype, "mixed_precision_param": "float32"},
        "model": {"hf_assets_path": base and str(base)},
    }
    return saved_model(folder, adapted, model=model, job_record=tables)


def small_adapters(folder: Path, family: str, num_layers: int) -> tuple[Decoder, HFModel, Path]:
    """Makes a folder/base; returns its model with random adapters, and a checkpoint of them."""
    small = small_model(family, num_layers)
    make_folder(folder / "base", small, torch.float32, one_file=True)
    ours, model = adapted(folder / "base")
    return ours, model, saved_adapters(folder, ours, model)
