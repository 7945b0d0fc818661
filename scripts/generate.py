"""Let a model go on with a text: plain decoding on one process, to read what it has learned.

    python scripts/generate.py outputs/checkpoint/step-1000 --prompt "def main("
    python scripts/generate.py HF_FOLDER --prompt "Once upon" --temperature 0.8 --top-k 50 --seed 1

The likeliest token each time, unless --temperature is above 0. The model and its tokenizer are
those that the checkpoint or Hugging Face folder tells of.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from titan_moe.config.errors import ConfigError
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.failure import print_errors
from titan_moe.runtime.launch import end_on_signals

if TYPE_CHECKING:
    from torch import Tensor

    from titan_moe.data.tokenizer import Tokenizer
    from titan_moe.models.decoder import Decoder


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path)
    parser.add_argument("--prompt", required=True, help="the text to go on with")
    parser.add_argument("--max-new-tokens", type=int, default=200, help="default: %(default)s")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0, the default: the likeliest token"
    )
    parser.add_argument("--top-k", type=int, default=0, help="draw from the k likeliest; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing; default: 0")
    parser.add_argument("--tokenizer", help="as model.tokenizer_path; default: the checkpoint's")
    parser.add_argument("--bos", action="store_true", help="put the tokenizer's BOS in front")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="default: float32, with a GPU bfloat16",
    )
    options = parser.parse_args(argv)
    if options.temperature < 0 or options.top_k < 0 or options.max_new_tokens < 1:
        parser.error("--temperature and --top-k are 0 or more, --max-new-tokens 1 or more")
    try:
        _generate(options)
    except ConfigError as error:
        print_errors(error.lines)
        return 2
    except RunError as error:
        print_errors([str(error)])
        return 1
    return 0


def _generate(options: argparse.Namespace) -> None:
    import torch

    from titan_moe.checkpoint.hf.transfer import load_alone

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    default = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = getattr(torch, options.dtype) if options.dtype else default
    loaded = load_alone(options.checkpoint, dtype=dtype, device=device)
    tokenizer = _tokenizer([options.tokenizer] if options.tokenizer else loaded.tokenizers)
    config = loaded.model.config
    ids = [int(token) for token in tokenizer.encode(options.prompt)]
    if options.bos and tokenizer.bos_id is not None:
        ids = [tokenizer.bos_id, *ids]
    if not ids:
        raise ConfigError(["--prompt is empty: give the model a word to go on from"])
    if max(ids) >= config.vocab_size:
        raise ConfigError(
            [
                f"the tokenizer's ids reach {max(ids)}, the model's vocab_size={config.vocab_size}:"
                " name the right one with --tokenizer"
            ]
        )
    generator = torch.Generator(device).manual_seed(options.seed)
    tokens_1S = torch.tensor([ids], device=device)
    print(options.prompt, end="", flush=True)
    new = decode(loaded.model, tokens_1S, options, tokenizer, generator)
    for piece in readable(new, tokenizer):
        print(piece, end="", flush=True)
    print()


def _tokenizer(names: list[str]) -> "Tokenizer":
    from titan_moe.data.tokenizer import load_tokenizer

    first: ConfigError | None = None
    for name in names:
        try:
            return load_tokenizer(name)
        except ConfigError as error:
            first = first or error
    raise first or ConfigError(["the checkpoint names no tokenizer: name one with --tokenizer"])


def decode(
    model: "Decoder",
    tokens_1S: "Tensor",
    options: argparse.Namespace,
    tokenizer: "Tokenizer",
    generator: object,
) -> Iterator[int]:
    """New tokens, up to the end of the text.

    The whole text is computed anew for each token, at a price that grows with its square: a cache
    of keys and values would be a second form of each kind of attention, for reading a few lines.
    """
    import torch

    limit = model.config.max_seq_len
    for _ in range(options.max_new_tokens):
        tokens_1S = tokens_1S[:, -limit:]
        positions_1S = torch.arange(tokens_1S.shape[1], device=tokens_1S.device)[None]
        with torch.no_grad():
            logits_V = model(tokens_1S, torch.zeros_like(tokens_1S), positions_1S)[0, -1].float()
        logits_V = logits_V[: tokenizer.vocab_size]  # The model's may be padded to be divisible.
        if options.temperature == 0:
            token = int(logits_V.argmax())
        else:
            if options.top_k:
                worst = logits_V.topk(min(options.top_k, len(logits_V))).values[-1]
                logits_V = logits_V.masked_fill(logits_V < worst, float("-inf"))
            shares_V = (logits_V / options.temperature).softmax(-1)
            token = int(shares_V.multinomial(1, generator=generator))  # type: ignore[call-overload]
        if token == tokenizer.eos_id:
            return
        yield token
        tokens_1S = torch.cat([tokens_1S, tokens_1S.new_tensor([[token]])], dim=1)


def readable(tokens: Iterator[int], tokenizer: "Tokenizer") -> Iterator[str]:
    """The text of tokens as it grows; a character that takes several tokens comes when whole."""
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
    end_on_signals()
    sys.exit(main(sys.argv[1:]))
