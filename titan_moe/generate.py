"""Continue a text with a model: plain decoding on one process, to read what it has learned."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Training
from titan_moe.data.tokenizer import Tokenizer, load_tokenizer
from titan_moe.models.decoder import Decoder
from titan_moe.runtime.launch import run_as_command


@dataclass(frozen=True)
class Sampling:
    """Says how new tokens are chosen."""

    max_new_tokens: int = 200
    temperature: float = 0.0
    """0: the likeliest token each time."""
    top_k: int = 0
    """Draw from the k likeliest tokens; 0: from all."""
    seed: int = 0


def first_tokenizer(names: list[str], training: Training) -> Tokenizer:
    """The first of these model.tokenizer_path that can be loaded, for texts as the keys of
    `training` say; raises ConfigError."""
    first: ConfigError | None = None
    for name in names:
        try:
            return load_tokenizer(name, training)
        except ConfigError as error:
            first = first or error
    raise first or ConfigError(["the checkpoint names no tokenizer: name one with --tokenizer"])


def prompt_ids(
    prompt: str, tokenizer: Tokenizer, *, bos: bool | None, vocab_size: int
) -> list[int]:
    """The token ids of a prompt, after the tokenizer's BOS if `bos`; None: if documents begin so.

    Raises ConfigError for no token at all, and for ids that a model of `vocab_size` has not.
    """
    ids = [int(token) for token in tokenizer.encode(prompt)]
    if (tokenizer.prepend_bos if bos is None else bos) and tokenizer.bos_id is not None:
        ids = [tokenizer.bos_id, *ids]
    if not ids:
        raise ConfigError(["--prompt is empty: give the model a word to continue"])
    if max(ids) >= vocab_size:
        raise ConfigError(
            [
                f"the tokenizer's ids reach {max(ids)}, the model's vocab_size={vocab_size}:"
                " name the right one with --tokenizer"
            ]
        )
    return ids


@torch.no_grad()
def decode(
    model: Decoder, ids: list[int], sampling: Sampling, tokenizer: Tokenizer
) -> Iterator[int]:
    """Yields new tokens up to the end of the text, each as soon as it is chosen.

    Each token runs the whole text again: there is no cache of keys and values, which a few hundred
    tokens do not need. The model sees the last max_seq_len tokens.
    """
    device, longest = next(model.parameters()).device, model.config.max_seq_len
    generator = torch.Generator(device).manual_seed(sampling.seed)
    for _ in range(sampling.max_new_tokens):
        logits_V = model(torch.tensor([ids[-longest:]], device=device))[0, -1].float()
        # The model's vocabulary may be padded to be divisible.
        token = _choose(logits_V[: tokenizer.vocab_size], sampling, generator)
        if token in tokenizer.stop_ids:
            return
        yield token
        ids = [*ids, token]


def _choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    if sampling.top_k:
        worst = logits_V.topk(min(sampling.top_k, len(logits_V))).values[-1]
        logits_V = logits_V.masked_fill(logits_V < worst, float("-inf"))
    shares_V = (logits_V / sampling.temperature).softmax(-1)
    return int(shares_V.multinomial(1, generator=generator))


if __name__ == "__main__":
    run_as_command("generate")
