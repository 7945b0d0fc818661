"""Text by kept keys and values is that of the whole text computed at once."""

from dataclasses import replace

import pytest
import torch

from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.distributed.init_weights import fill_initial_weights
from titan_moe.generate import Reader, Sampling, decode
from titan_moe.models.config import ModelConfig
from titan_moe.models.decoder import Decoder, initial_std
from titan_moe.models.registry import FAMILIES, model_config


def _model(config: ModelConfig) -> Decoder:
    model = Decoder(config).double()

    def std_of(name: str) -> float | None:
        std = initial_std(name, config)
        return None if std is None else 0.02 + 2 * std  # Biases and sinks too.

    fill_initial_weights(model, 0, std_of)
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_one_by_one_get_the_logits_of_the_whole_text(family: str) -> None:
    config = model_config(family, "gate")
    if config.local is not None:
        config = replace(config, local=replace(config.local, size=4))
    model = _model(config)
    tokens_BS = torch.randint(config.vocab_size, (2, 14))
    with torch.no_grad():
        whole = model(tokens_BS)
    reader = Reader(model)
    parts = [reader(part) for part in tokens_BS.split([5, 1, 1, 2, 1, 1, 1, 1, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(model(tokens_BS), whole), "reading changed the model"


def test_each_new_token_is_computed_alone_and_yielded_at_once() -> None:
    config = replace(model_config("qwen3", "gate"), max_seq_len=16)
    model = _model(config)
    lengths: list[int] = []
    hook = lambda module, args: lengths.append(args[0].shape[1])  # noqa: E731
    model.layers["0"].register_forward_pre_hook(hook)
    tokens = decode(model, [1] * 12, Sampling(max_new_tokens=8), load_tokenizer("bytes"))
    for number, _ in enumerate(tokens, 1):
        assert len(lengths) == number
    # Five tokens fit into 16 after 12, then the last 8 are read anew.
    assert lengths == [12, 1, 1, 1, 1, 8, 1, 1]


def test_a_decoder_takes_tokens_alone() -> None:
    config = model_config("llama4", "gate")
    model = _model(config)
    tokens_BS = torch.randint(config.vocab_size, (2, 9))
    positions_BS = torch.arange(9).expand(2, -1)
    with torch.no_grad():
        said = model(tokens_BS, torch.zeros_like(tokens_BS), positions_BS)
        assert torch.equal(model(tokens_BS), said)
