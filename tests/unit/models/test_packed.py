"""Documents that are packed into one sequence are computed as each alone."""

import pytest
import torch

from titan_moe.models.attention import plain_core
from titan_moe.models.decoder import Decoder
from titan_moe.models.registry import FAMILIES, model_config
from titan_moe.ops.gated_delta import Recurrence, chunked_rule
from titan_moe.verify.parity.check import distance

LENGTHS = [23, 27]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_have_the_logits_of_each_alone(family: str):
    config = model_config(family, "gate")
    recurrence = Recurrence(chunked_rule, mask_documents=True)
    model = Decoder(config, plain_core(config, mask_documents=True), recurrence).double().eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3 if parameter.ndim > 1 else 1, generator=generator)
    tokens = torch.randint(config.vocab_size, (1, sum(LENGTHS)), generator=generator)
    documents = torch.tensor([[0] * LENGTHS[0] + [1] * LENGTHS[1]])
    # Some models count positions in each document.
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with torch.no_grad():
        packed = model(tokens, documents, positions)
        alone = torch.cat([model(part) for part in tokens.split(LENGTHS, 1)], 1)
    assert distance(packed, alone) < 1e-13
