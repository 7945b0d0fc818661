"""Continue a text with a model: plain decoding on one process, to read what it has learned."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_moe.config.errors import ConfigError
from titan_moe.data.tokenizer import Tokenizer, load_tokenizer
from titan_moe.models.decoder import Decoder
from titan_moe.ops.attention import first_seen, is_seen, sdpa
from titan_moe.ops.local_attention import LocalAttention
from titan_moe.runtime.launch import run_as_command


@dataclass(frozen=True)
class Sampling:
    """How new tokens are chosen."""

    max_new_tokens: int = 200
    temperature: float = 0.0
    """0: the likeliest token each time."""
    top_k: int = 0
    """Draw from the k likeliest tokens; 0: from all."""
    seed: int = 0


def first_tokenizer(names: list[str]) -> Tokenizer:
    """The first of these model.tokenizer_path that can be loaded; raises ConfigError."""
    first: ConfigError | None = None
    for name in names:
        try:
            return load_tokenizer(name)
        except ConfigError as error:
            first = first or error
    raise first or ConfigError(["the checkpoint names no tokenizer: name one with --tokenizer"])


def prompt_ids(prompt: str, tokenizer: Tokenizer, *, bos: bool, vocab_size: int) -> list[int]:
    """The token ids of a prompt, after the tokenizer's BOS if `bos`.

    Raises ConfigError for no token at all, and for ids that a model of `vocab_size` has not.
    """
    ids = [int(token) for token in tokenizer.encode(prompt)]
    if bos and tokenizer.bos_id is not None:
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


class CachedCore:
    """The `AttentionCore` of one layer while a text is generated. Has no gradient.

    Each call appends its keys and values to those of the calls before, and attends to all.
    """

    def __init__(self, local: LocalAttention | None) -> None:
        self._local = local
        self._past: tuple[Tensor, Tensor] | None = None

    def mask(self, documents_BS: Tensor, local=None, bounds=None) -> None:  # type: ignore[no-untyped-def]
        """Each layer makes its own: how many tokens came before is known there."""

    def __call__(  # type: ignore[no-untyped-def]
        self, q_BHSC, k_BHSC: Tensor, v_BHSC: Tensor, mask: None, scale: float, sinks_H=None
    ) -> Tensor:
        if self._past is not None:
            pairs = zip(self._past, (k_BHSC, v_BHSC), strict=True)
            k_BHSC, v_BHSC = (torch.cat(pair, 2) for pair in pairs)
        self._past = k_BHSC, v_BHSC
        keys_S = torch.arange(k_BHSC.shape[2], device=k_BHSC.device)
        queries_S = keys_S[-q_BHSC.shape[2] :]
        seen = is_seen(queries_S, keys_S, first_seen(queries_S, self._local)[None])
        return sdpa(q_BHSC, k_BHSC, v_BHSC, seen[:, None], scale, sinks_H)


class Reader:
    """Logits of a text that is given part by part, for a model whose parameters lie in one process.

    A copy of the model's modules with its own parameters: its layers keep keys and values.
    """

    def __init__(self, model: Decoder) -> None:
        self._model = deepcopy(model, {id(p): p for p in model.parameters()}).eval()
        self._model.core = CachedCore(None)
        for block in self._model.blocks().values():
            block.attention.core = CachedCore(block.local)
        self._length = 0

    @torch.no_grad()
    def __call__(self, tokens_BS: Tensor) -> Tensor:
        """Logits [B, S, V] of the next tokens of each row."""
        positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device) + self._length
        self._length += tokens_BS.shape[1]
        return self._model(tokens_BS, positions_BS=positions_S.expand_as(tokens_BS))


def decode(
    model: Decoder, ids: list[int], sampling: Sampling, tokenizer: Tokenizer
) -> Iterator[int]:
    """New tokens, up to the end of the text; each is yielded as soon as it is chosen.

    A text that fills the model's max_seq_len goes on from its second half.
    """
    device, longest = next(model.parameters()).device, model.config.max_seq_len
    generator = torch.Generator(device).manual_seed(sampling.seed)
    ids, reader = ids[-longest:], Reader(model)
    new = ids
    for _ in range(sampling.max_new_tokens):
        if len(ids) > longest:
            new = ids = ids[-max(longest // 2, 1) :]
            reader = Reader(model)
        logits_V = reader(torch.tensor([new], device=device))[0, -1].float()
        # The model's vocabulary may be padded to be divisible.
        token = _choose(logits_V[: tokenizer.vocab_size], sampling, generator)
        if token == tokenizer.eos_id:
            return
        yield token
        new, ids = [token], [*ids, token]


def _choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    if sampling.top_k:
        worst = logits_V.topk(min(sampling.top_k, len(logits_V))).values[-1]
        logits_V = logits_V.masked_fill(logits_V < worst, float("-inf"))
    shares_V = (logits_V / sampling.temperature).softmax(-1)
    return int(shares_V.multinomial(1, generator=generator))


def readable(tokens: Iterator[int], tokenizer: Tokenizer) -> Iterator[str]:
    """The text of tokens as it grows; a character of several tokens comes when it is whole."""
    known: list[int] = []
    shown = 0
    for token in tokens:
        known.append(token)
        text = tokenizer.decode(known)
        # Four bytes is the longest character: more than that is no beginning of one.
        if text.endswith("\ufffd") and not text.endswith("\ufffd" * 4):
            continue
        yield text[shown:]
        shown = len(text)
    yield tokenizer.decode(known)[shown:]


if __name__ == "__main__":
    run_as_command("generate")
