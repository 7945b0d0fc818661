"""Continue a text with a model: plain decoding on one process, to read what it has learned."""

import os
from collections.abc import Iterator, Mapping
from datetime import date
from os.path import expanduser
from pathlib import Path
from typing import Any

import torch

from titan_moe.checkpoint.hf.read import load_alone
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Training
from titan_moe.data.conversations import ChatError
from titan_moe.data.tokenizer import Tokenizer, load_tokenizer
from titan_moe.models.cache import with_cache
from titan_moe.models.config import CompressedConfig
from titan_moe.models.decoder import Decoder
from titan_moe.runtime.device import pick_device
from titan_moe.runtime.launch import Launch, count_gpus, run_as_command


def prompt_ids(
    prompt: str | Mapping[str, Any], tokenizer: Tokenizer, *, vocab_size: int
) -> list[int]:
    """The token ids of a text, after the tokenizer's BOS if documents begin so, or of a chat, an
    object with `messages` and maybe `tools`, up to where the assistant answers.

    Raises ConfigError for no token at all, for messages that the chat template refuses, and for ids
    that a model of `vocab_size` has not.
    """
    if not isinstance(prompt, str):
        assert tokenizer.conversations is not None
        try:
            messages, tools = prompt["messages"], prompt.get("tools")
            ids = tokenizer.conversations.prompt(messages, tools).tolist()
        except ChatError as error:
            remedy = "give other messages, by --system or --messages"
            raise ConfigError(f"--chat {messages!r:.120}: {error}: {remedy}") from None
    else:
        ids = [int(token) for token in tokenizer.encode(prompt)]
        if tokenizer.prepend_bos and tokenizer.bos_id is not None:
            ids = [tokenizer.bos_id, *ids]
    if not ids:
        raise ConfigError("--prompt is empty: give the model a word to continue")
    if max(ids) >= vocab_size:
        raise ConfigError(
            f"the tokenizer's ids reach {max(ids)}, the model's vocab_size={vocab_size}:"
            " name the right one with --tokenizer"
        )
    return ids


def load_model(
    path: str | Path,
    *,
    tokenizer: str | None = None,
    chat: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> tuple[Decoder, Tokenizer]:
    """Returns the model of a step-N folder or of a Hugging Face folder, whole, in evaluation, and
    its tokenizer, the likeliest that can be loaded. Raises ConfigError or RunError in one line.

    Args:
        tokenizer: as model.tokenizer_path; None: the one that the folder names.
        chat: read a chat template too: the one that the model was trained with, else that of
            training.messages.template, else the tokenizer's own.
        dtype: None: bfloat16 on a GPU, else float32.
        device: None: the first GPU, or the CPU where there is none.
    """
    device = device or pick_device(Launch(), count_gpus(os.environ))
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    loaded = load_alone(Path(path).expanduser(), dtype=dtype, device=device)
    names = [expanduser(tokenizer)] if tokenizer else loaded.tokenizers
    training = loaded.training or Training()
    day = training.messages.date or date.today().isoformat()
    given = training.messages.template if loaded.template is None else None
    messages = training.messages.model_copy(update={"date": day, "template": given})
    update = {"dataset_format": "messages" if chat else "text", "messages": messages}
    training, first = training.model_copy(update=update), None
    for name in names:
        try:
            return loaded.model, load_tokenizer(name, training, loaded.template)
        except ConfigError as error:
            first = first or error
    raise first or ConfigError("the checkpoint names no tokenizer: name one with --tokenizer")


def continue_text(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str | Mapping[str, Any],
    **sampling: Any,
) -> str:
    """Returns what a model writes after a prompt, up to the end of the text or of its turn.

    Args:
        prompt: a text, or a chat, an object with `messages` and maybe `tools`, which it answers.
        sampling: the keyword arguments of `decode`.
    """
    ids = prompt_ids(prompt, tokenizer, vocab_size=model.config.vocab_size)
    return tokenizer.decode(list(decode(model, ids, tokenizer, **sampling)))


@torch.no_grad()
def decode(
    model: Decoder,
    ids: list[int],
    tokenizer: Tokenizer,
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
) -> Iterator[int]:
    """Yields new tokens up to the end of the text, each as soon as it is chosen.

    Keys, values and recurrent states are kept, so that a token runs alone. The model sees the last
    max_seq_len tokens: in a longer text their positions change with every token, and all of them
    run again, as they always do in attention to compressed blocks.

    Args:
        temperature: 0: the likeliest token each time.
        top_k: draw from the k likeliest tokens; 0: from all.
    """
    device, longest = next(model.parameters()).device, model.config.max_seq_len
    generator = torch.Generator(device).manual_seed(seed)
    keeps = not isinstance(model.config.attention, CompressedConfig)  # Blocks have no cache.
    cached, read = with_cache(model) if keeps else model, 0
    for _ in range(max_new_tokens):
        if len(ids) > longest:
            ids, read, cached = ids[-longest:], 0, model
        tokens_1S = torch.tensor([ids[read:]], device=device)
        positions_1S = torch.arange(read, len(ids), device=device)[None]
        (hidden_1SD,) = cached.hidden(tokens_1S, torch.zeros_like(tokens_1S), positions_1S)
        logits_V = cached.output(hidden_1SD[:, -1:])[0, -1].float()
        read = len(ids) if keeps else 0
        # The model's vocabulary may be padded to be divisible.
        logits_V = logits_V[: tokenizer.vocab_size]
        if temperature == 0:
            token = int(logits_V.argmax())
        else:
            if top_k:
                worst = logits_V.topk(min(top_k, len(logits_V))).values[-1]
                logits_V = logits_V.masked_fill(logits_V < worst, float("-inf"))
            shares_V = (logits_V / temperature).softmax(-1)
            token = int(shares_V.multinomial(1, generator=generator))
        if token in tokenizer.stop_ids:
            return
        yield token
        ids = [*ids, token]


if __name__ == "__main__":
    run_as_command("generate")
