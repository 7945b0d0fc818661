"""Compares the logits of a checkpoint's model with those that transformers computes of its export.

Both models run in float32 on the CPU, whole, in this process, with weights as they are written:
those of the checkpoint are rounded likewise. Experts whose scores nearly tie may be chosen
otherwise by two right computations, so the tokens are drawn anew where they do.
"""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from titan_moe.checkpoint.hf.folder import HFFolder
from titan_moe.checkpoint.hf.names import find
from titan_moe.checkpoint.hf.read import load_alone
from titan_moe.models.decoder import Decoder
from titan_moe.models.hf import HFModel, model_of, read_settings, wrapper_of
from titan_moe.runtime.errors import RunError
from titan_moe.verify.parity.check import SMALLEST_MARGIN, distance, watch_margins
from titan_moe.verify.parity.oracle import FirstOfEqual

BOUND = 1e-4
"""Largest difference of a position's logits, relative to the norm of theirs."""
_NUM_TOKENS = 16
_DRAWS = 20


def logits_difference(checkpoint: Path, folder: Path) -> float:
    """Returns the largest difference of the logits on random tokens, over positions: the norm of a
    position's difference over the norm of theirs.

    Raises RunError where transformers does not know the model, or it is inside one that also sees.
    """
    settings = read_settings(folder)
    kind = settings["model_type"]
    if wrapper_of(settings) is not None:
        raise RunError(f"{folder} is written, but --logits compares text models, not {kind}")
    try:
        AutoConfig.from_pretrained(folder)
    except ValueError:
        raise RunError(f"{folder} is written, but transformers does not know {kind}") from None
    ours = _rounded(checkpoint, folder)
    with torch.no_grad(), FirstOfEqual():
        tokens_BS = _tokens_without_ties(ours)
        theirs = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        logits_BSV = theirs.eval()(tokens_BS, use_cache=False).logits
        rows = zip(ours(tokens_BS)[0], logits_BSV[0], strict=True)
        return max(distance(mine, other) for mine, other in rows)


@torch.no_grad()
def _rounded(checkpoint: Path, folder: Path) -> Decoder:
    """Returns the checkpoint's model, its weights rounded to the types of a folder's tensors."""
    model = load_alone(checkpoint, dtype=torch.float32, device=torch.device("cpu")).model
    written = HFFolder(folder)
    places = find(HFModel(model_of(folder).family, model.config), written)
    for name, parameter in model.named_parameters():
        stored = next(iter(places[name].tensors()))
        parameter.copy_(parameter.to(written.dtype(stored)))
    return model


def _tokens_without_ties(model: Decoder) -> Tensor:
    margins: list[float] = []
    watch_margins(model, margins)
    generator = torch.Generator().manual_seed(0)
    for _ in range(_DRAWS):
        shape = (1, _NUM_TOKENS)
        tokens_BS = torch.randint(model.config.vocab_size, shape, generator=generator)
        margins.clear()
        model(tokens_BS)
        if min(margins, default=1.0) > SMALLEST_MARGIN:
            break
    return tokens_BS
