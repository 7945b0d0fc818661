"""Let a model continue a text, to read what it has learned.

    titan-moe generate outputs/checkpoint/step-1000 --prompt "def main("
    titan-moe generate HF_FOLDER --prompt "Once upon" --temperature 0.8 --top-k 50 --seed 1
    titan-moe generate HF_FOLDER --chat --prompt "What is a router?"

The likeliest token each time, unless --temperature is above 0. The model and its tokenizer are
those that the checkpoint or Hugging Face folder names.

Exit codes: 0; 1 the checkpoint cannot be read; 2 a wrong argument.
"""

import argparse
import math

from titan_moe.cli.command import Answer, Command, add_seed, not_negative, path_of, positive
from titan_moe.config.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=path_of)
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is a user's message: answer it"
    )
    parser.add_argument("--max-new-tokens", type=positive, default=200, help="default: %(default)s")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0, the default: the likeliest token"
    )
    parser.add_argument(
        "--top-k", type=not_negative, default=0, help="draw from the k likeliest; 0: all"
    )
    parser.add_argument("--tokenizer", help="as model.tokenizer_path; default: the checkpoint's")
    parser.add_argument(
        "--bos",
        action=argparse.BooleanOptionalAction,
        help="put the tokenizer's BOS in front; default: as training.prepend_bos says",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: float32, with a GPU bfloat16"
    )
    add_seed(parser, default=0, says="seed of drawn tokens")


def run(options: argparse.Namespace) -> Answer:
    if not 0 <= options.temperature < math.inf:
        raise ConfigError(f"--temperature {options.temperature} must be 0 or more")
    import torch

    from titan_moe.generate import continue_text, load_model

    dtype = getattr(torch, options.dtype) if options.dtype else None
    model, tokenizer = load_model(
        options.checkpoint, tokenizer=options.tokenizer, chat=options.chat, dtype=dtype
    )
    how = {name: getattr(options, name) for name in ("max_new_tokens", "temperature", "top_k")}
    how |= {"bos": options.bos, "seed": options.seed, "chat": options.chat}
    text = continue_text(model, tokenizer, options.prompt, **how)
    shown = text if options.chat else options.prompt + text
    return Answer({"prompt": options.prompt, "text": text}, [shown])


COMMAND = Command(run, add_arguments, ends_at_once=True)
