"""Chat templates that mark what the assistant writes, in the manner of published models, a
tokenizer that has their special tokens, and conversations drawn at random."""

import json
import random
import re

import tokenizers

from titan_moe.data.chat import CHATML_TOKENS, chatml

_LAST_USER = """\
{%- set ns = namespace(first=0, last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
"""

TEMPLATES = {
    "chatml": chatml(*CHATML_TOKENS),
    # Earlier turns lose their thoughts, as Qwen3's do; tools, and calls of them.
    "thoughts": _LAST_USER
    + """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if loop.index0 > ns.last and message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    # Channels, a date, and another token at the end of the last turn, as in gpt-oss.
    "channels": _LAST_USER
    + """\
{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|start|>assistant' }}
        {%- generation %}
        {%- if loop.index0 > ns.last and message.thinking %}
            {{- '<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
            {{- '<|start|>assistant' }}
        {%- endif %}
        {%- if message.tool_calls %}
            {{- '<|channel|>commentary<|message|>' + (message.tool_calls | tojson) + '<|call|>' }}
        {%- else %}
            {{- '<|channel|>final<|message|>' + message.content }}
            {{- '<|return|>' if loop.last else '<|end|>' }}
        {%- endif %}
        {%- endgeneration %}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}""",
    # A prompt that begins a thought which the turns lack, as DeepSeek-R1's.
    "thought in the prompt": """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|Assistant|>' }}
        {%- generation %}{{ message.content + eos_token }}{% endgeneration %}
    {%- else %}
        {{- '<|User|>' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}""",
    # Headers, and contents without blanks around them, as Llama 3's.
    "headers": """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|header|>' + message.role + '<|header_end|>\\n\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content | trim + '<|eot_id|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|header|>assistant<|header_end|>\\n\\n' }}{% endif %}""",
    # No token ends a turn, as in GLM-4.5.
    "no end": _LAST_USER
    + """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|Assistant|>' }}
        {%- generation %}
        {{- '\\n<think>' + (message.thinking or '' if loop.index0 > ns.last else '') + '</think>' }}
        {{- '\\n' + message.content }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|User|>\\n' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}""",
}
SPECIAL = sorted({token for text in TEMPLATES.values() for token in re.findall(r"<\|\w+\|>", text)})
SPECIAL += ["<s>", "</s>", "<think>", "</think>"]
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
