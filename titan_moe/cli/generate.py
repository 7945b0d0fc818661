"""Let a model continue a text, to read what it has learned.

    titan-moe generate outputs/checkpoint/step-1000 --prompt "def main("
    titan-moe generate HF_FOLDER --prompt "Once upon" --temperature 0.8 --top-k 50 --seed 1
    titan-moe generate HF_FOLDER --chat --system "Be brief." --prompt "What is a router?"
    titan-moe generate HF_FOLDER --messages talk.json

The likeliest token each time, unless --temperature is above 0. The model and its tokenizer are
those that the checkpoint or Hugging Face folder names. talk.json holds a list of messages, or an
object with `messages` and `tools`, which the model answers.

Exit codes: 0; 1 the checkpoint cannot be read; 2 a wrong argument.
"""

import argparse
import json
import math
from typing import Any

from titan_moe.cli.command import Answer, Command, add_seed, not_negative, path_of, positive
from titan_moe.config.errors import ConfigError
from titan_moe.runtime.errors import reason


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=path_of)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--prompt", help="the text to continue")
    says = "a JSON file of messages, or with `messages` and `tools`: answer them"
    asked.add_argument("--messages", type=path_of, metavar="FILE", help=says)
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is a user's message: answer it"
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat: the system's message")
    parser.add_argument("--max-new-tokens", type=positive, default=200, help="default: %(default)s")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0, the default: the likeliest token"
    )
    parser.add_argument(
        "--top-k", type=not_negative, default=0, help="draw from the k likeliest; 0: all"
    )
    parser.add_argument("--tokenizer", help="as model.tokenizer_path; default: the checkpoint's")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: float32, with a GPU bfloat16"
    )
    add_seed(parser, default=0, says="seed of drawn tokens")


def run(options: argparse.Namespace) -> Answer:
    if not 0 <= options.temperature < math.inf:
        raise ConfigError(f"--temperature {options.temperature} must be 0 or more")
    import torch

    from titan_moe.cli.generation import continue_text, load_model

    prompt = _prompt(options)
    chat = not isinstance(prompt, str)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    model, tokenizer = load_model(
        options.checkpoint, tokenizer=options.tokenizer, chat=chat, dtype=dtype
    )
    names = "max_new_tokens", "temperature", "top_k", "seed"
    how = {name: getattr(options, name) for name in names}
    text = continue_text(model, tokenizer, prompt, **how)
    return Answer({"prompt": prompt, "text": text}, [text if chat else f"{prompt}{text}"])


def _prompt(options: argparse.Namespace) -> str | dict[str, Any]:
    """Returns a text, or messages and tools. Raises ConfigError."""
    from titan_moe.data.conversations import conversation_text

    system, path = options.system, options.messages
    if system is not None and (path or not options.chat):
        remedy = "add these, or write it as the first of --messages"
        raise ConfigError(f"--system {system!r} goes with --chat and --prompt: {remedy}")
    if path is None:
        said = ("system", system), ("user", options.prompt)
        messages = [{"role": role, "content": text} for role, text in said if text is not None]
        return {"messages": messages} if options.chat else options.prompt
    try:
        found = json.loads(path.read_bytes())
        text = conversation_text(found if isinstance(found, dict) else {"messages": found}) or "{}"
        talk = json.loads(text.encode())  # ValueError for half a surrogate pair.
        return {"messages": talk["messages"], "tools": talk.get("tools")}
    except (OSError, ValueError, KeyError) as error:
        remedy = 'write a list such as [{"role": "user", "content": "Hello"}]'
        raise ConfigError(f"--messages {path}: {reason(error)}: {remedy}") from None


COMMAND = Command(run, add_arguments, ends_at_once=True)
