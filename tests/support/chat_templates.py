"""Chat templates that mark what the assistant writes, in the manner of families (templates/), a
tokenizer with their special tokens, conversations drawn at random, and a table of records."""

import json
import random
import re
from pathlib import Path

import tokenizers

from titan_moe.data.chat_template import CHATML_TOKENS, chatml

_FILES = sorted((Path(__file__).parent / "templates").glob("*.jinja"))
TEMPLATES = {"chatml": chatml(*CHATML_TOKENS)} | {file.stem: file.read_text() for file in _FILES}
SPECIAL = sorted({token for text in TEMPLATES.values() for token in re.findall(r"<\|\w+\|>", text)})
SPECIAL += ["<|im_user|>", "<|im_system|>", "<|user|>", "<|system|>", "<s>", "</s>", "<think>"]
SPECIAL += ["</think>", "<tool_call>", "</tool_call>", "[gMASK]", "<sop>", "]~!b[", "]~b]", "[e~["]
WITHOUT_TOOLS = ("chatml", "deepseek_r1", "llama3", "mixtral")
_TABLE = json.loads((Path(__file__).parent / "conversation_formats.json").read_text())
FORMATS: dict[str, dict] = _TABLE["records"]
"""A record of each form that data sets have, by its name."""
LEARNED: dict[str, dict] = _TABLE["learned"]
"""Texts to be learned, or the reason of a refusal, by template and form. Written by hand."""
ALL = ["contents", "calls", "tools", "thoughts"]
"""Everything that training.messages.may_leave_out allows."""
_WORDS = ["yes", "no", "<b>bold</b>", "naïve", "水 🙂", "x=1;", "</div>", "a\nb"]
_WORDS += ["<|im_x|>", "12345", "{{", "}}", "{%", "the"]


def without_marks(template):
    """The same text: other statements take the marks' place, since blanks around them matter."""
    return template.replace("generation %}", "if %}").replace("%- if %}", "%- if true %}")


def tokenizer_file(folder, **settings):
    """Writes a tokenizer of bytes and some merges, with the special tokens, and its settings."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([*TEMPLATES.values(), " ".join(_WORDS)], trainer)
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", **settings}))
    bpe.save(str(folder / "tokenizer.json"))
    return bpe


def draw_text(rng):
    return " ".join(rng.choices(_WORDS, k=rng.randrange(1, 8))) or "x"


def draw_messages(rng):
    """A conversation of one to three turns, some with a system message and thoughts."""
    messages = [{"role": "system", "content": draw_text(rng)}] if rng.random() < 0.4 else []
    for _ in range(rng.randrange(1, 4)):
        answer = {"role": "assistant", "content": draw_text(rng)}
        if rng.random() < 0.4:
            answer["reasoning_content"] = draw_text(rng)
        messages += [{"role": "user", "content": draw_text(rng)}, answer]
    return messages


def draw_calls(rng):
    """A conversation in which the assistant calls a tool, some after a thought or before other
    turns; the tools."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": rng.randrange(9)}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    if rng.random() < 0.5:
        calling["reasoning_content"] = draw_text(rng)
    messages = draw_messages(rng)
    messages[-1:-1] = [calling, {"role": "tool", "content": draw_text(rng)}]
    if rng.random() < 0.5:
        messages += [each for each in draw_messages(rng) if each["role"] != "system"]
    return messages, [{"type": "function", "function": {"name": "f", "parameters": {"x": "é"}}}]


def draws(seed, count):
    rng = random.Random(seed)
    return [draw_messages(rng) for _ in range(count)]
