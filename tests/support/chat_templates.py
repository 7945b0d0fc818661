"""Chat templates that mark what the assistant writes, in the manner of families (templates/), a
tokenizer with their special tokens, conversations drawn at random, and a table of records."""

import datetime
import json
import random
import re
from pathlib import Path

import numpy as np
import tokenizers

from titan_moe.config.job_config import Training
from titan_moe.data.chat_template import CHATML_TOKENS, chatml
from titan_moe.data.conversations import conversation_text
from titan_moe.data.tokenizer import load_tokenizer

TODAY = datetime.date(2026, 1, 31)

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


def conversations_of(folder, template, targets="assistant", **keys):
    """Returns the conversations of a template and of the tokenizer in a folder."""
    (folder / "template.jinja").write_text(template)
    messages = {"template": str(folder / "template.jinja"), "date": str(TODAY), "targets": targets}
    training = Training(dataset_format="messages", messages=messages | keys)
    return load_tokenizer(str(folder), training).conversations


def tokens_of(conversations, record):
    """Returns the ids of a record, and whether each is a target."""
    found = conversations.encode("", conversation_text(record))
    return found.ids, found.is_target


def said(folder, conversations, record):
    """Returns the runs of targets of a record, as texts."""
    ids, is_target = tokens_of(conversations, record)
    tokenizer = load_tokenizer(str(folder), Training())
    return [tokenizer.decode(ids[first:last]) for first, last in runs(is_target)]


def runs(is_target):
    """Returns the first and last + 1 place of each run of targets."""
    edges = np.flatnonzero(np.diff([False, *is_target, False]))
    return edges.reshape(-1, 2).tolist()
