"""Decoding takes the likeliest token of the whole text."""

from dataclasses import replace

import torch

from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.distributed.init_weights import fill_initial_weights
from titan_moe.generate import Sampling, decode
from titan_moe.models.decoder import Decoder, initial_std
from titan_moe.models.registry import model_config


def _model(family: str, **changes: int) -> Decoder:
    config = replace(model_config(family, "gate"), **changes)
    model = Decoder(config).double()
    fill_initial_weights(model, 0, lambda name: initial_std(name, config))
    return model.eval()


def test_decode_takes_the_likeliest_token_of_the_last_max_seq_len() -> None:
    model = _model("qwen3", max_seq_len=16)
    tokenizer = load_tokenizer("bytes")
    ids = list(range(12))
    for token in decode(model, ids, Sampling(max_new_tokens=8), tokenizer):
        with torch.no_grad():
            logits_V = model(torch.tensor([ids[-16:]]))[0, -1]
        assert token == int(logits_V[: tokenizer.vocab_size].argmax())
        ids = [*ids, token]
    assert len(ids) == 20


def test_a_decoder_takes_tokens_alone() -> None:
    model = _model("llama4")
    tokens_BS = torch.randint(model.config.vocab_size, (2, 9))
    positions_BS = torch.arange(9).expand(2, -1)
    with torch.no_grad():
        said = model(tokens_BS, torch.zeros_like(tokens_BS), positions_BS)
        assert torch.equal(model(tokens_BS), said)
