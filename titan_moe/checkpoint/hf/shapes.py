"""The tensors of a whole model, without their memory."""

import torch

from titan_moe.models.config import ModelConfig
from titan_moe.models.decoder import Decoder


def model_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Parameters and persistent buffers by name, as a checkpoint of the model has them."""
    with torch.device("meta"):
        model = Decoder(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
