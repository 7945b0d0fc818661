"""A tokenizer's chat template: the text of a conversation, and each message's part of it.

A template is untrusted code of a model's folder: it runs in jinja2's sandbox, with the functions
that transformers gives it. Two things differ. A date is the one that the caller names, so that a
resumed run reads the same tokens; and the loops over messages are marked, so that the text of each
message is known whatever the template makes of it.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from titan_moe.data.conversations import ChatError
from titan_moe.data.order import digest

# Noncharacters of Unicode, which no text holds: two around text that a template marks as generated,
# and two around the number of the message that the text behind them belongs to.
_BEGIN, _END, _OPEN, _CLOSE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
EDGE = "\ufdd4"
"""Stands on both sides of a content that is searched for."""
RESERVED = re.compile(f"[{_BEGIN}-{EDGE}]")
_MARKS = re.compile(f"[{_BEGIN}{_END}]|{_OPEN}(\\d*){_CLOSE}")
_MARK = "titan_moe_mark"

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_CHATML = """\
{%- for message in messages %}
    {{- 'BEGIN' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + 'END' }}{% endgeneration %}
    {%- else %}
        {{- message.content + 'END' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'BEGINassistant\\n' }}{% endif -%}
"""


def chatml(begin: str, end: str) -> str:
    """The common template of models without one of their own, with the tokens of a turn's ends. It
    writes no tools and no calls of them."""
    return _CHATML.replace("BEGIN", begin).replace("END", end)


Message = dict[str, Any]
"""`role`, `content`, and what else transformers' templates read."""


class Talk(NamedTuple):
    """A conversation: messages, tools, and variables of the template that go before its own."""

    messages: Sequence[Message]
    tools: Any = None
    options: Mapping[str, Any] | None = None


class Part(NamedTuple):
    """Characters `begin` to `end` of a text, written for one message; None: for none."""

    message: int | None
    begin: int
    end: int


class Written(NamedTuple):
    """The text of a conversation, its parts in order, and those that the template marks as
    generated."""

    text: str
    parts: list[Part]
    generated: list[Part]

    def of(self, message: int | None) -> str:
        """The text of a message, or of none."""
        return "".join(self.text[p.begin : p.end] for p in self.parts if p.message == message)

    def part(self, message: int) -> Part | None:
        """The characters of a message; None if it has none, or several loops write of it."""
        own = [p for p in self.parts if p.message == message and self.text[p.begin : p.end].strip()]
        return own[0] if len(own) == 1 else None


class ChatTemplate:
    """Writes conversations, each a list of messages with `role` and `content`, and its tools."""

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str],
        *,
        special: Collection[str],
        date: datetime.date | None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """source: the template in Jinja. tokens: bos_token and others by these names. special: all
        texts that are one token each, whatever stands around them. date: the day that
        `strftime_now` gives; None: a template that asks is refused. options: further variables,
        such as enable_thinking.

        ChatError if the source is not valid.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda form: _write_date(date, form),
        }
        self.source = source
        self.identity = f"template={digest(source)}, date={date}, options={dict(options or {})}"
        """All that a text depends on, beside the special tokens."""
        self._variables = {**tokens, **(options or {})}
        # A tokenizer's longer names may begin with shorter ones.
        names = sorted(special, key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, names)) or "(?!)")
        """Finds special tokens in a text."""
        try:
            tree = environment.parse(source)
            marks = tree.find_all(jinja2.nodes.ExtensionAttribute)
            self.marks_targets = any(node.name == "mark" for node in marks)
            """True if the template says itself what the assistant writes."""
            _mark_loops(tree.body)
            code = environment.compile(tree)
        except jinja2.TemplateError as error:
            raise ChatError(f"the chat template is not valid: {error}") from None
        globals_ = environment.make_globals(None)
        self._template = jinja2.Template.from_code(environment, code, globals_)

    def write(self, talk: Talk, *, prompt: bool = False) -> Written:
        """The conversation; with `prompt`, up to where the assistant writes its next message.

        ChatError if the template refuses it.
        """
        messages = talk.messages
        numbers = {id(message): str(number) for number, message in enumerate(messages)}

        def mark(*message: Any) -> str:
            number = numbers.get(id(message[0])) if message else ""
            return "" if number is None else f"{_OPEN}{number}{_CLOSE}"

        variables = self._variables | dict(talk.options or {})
        variables |= {"messages": list(messages), "tools": talk.tools, "documents": None}
        variables[_MARK] = mark
        try:
            text = self._template.render(variables | {"add_generation_prompt": prompt})
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ChatError(f"the chat template refuses it: {error}") from None
        return _parsed(text)

    def ends_with_token(self, text: str) -> bool:
        """True if the last thing in a text is a special token."""
        return any(token.end() == len(text) for token in self.special.finditer(text))

    @cached_property
    def ends_turns(self) -> bool:
        """True if a token ends each answer in its own part; else the next message's header does, as
        GLM-4.5's, or nothing."""
        roles = ("user", "assistant", "user")
        written = self.write(Talk([{"role": role, "content": "a"} for role in roles]))
        return self.ends_with_token(written.of(1).rstrip())


def _parsed(marked: str) -> Written:
    """Takes the marks out of a text."""
    pieces: list[str] = []
    parts: list[Part] = []
    generated: list[Part] = []
    message, at, last, opened = None, 0, 0, 0
    for mark in [*_MARKS.finditer(marked), None]:
        pieces.append(marked[last : mark.start() if mark else len(marked)])
        begin, at = at, at + len(pieces[-1])
        parts.append(Part(message, begin, at))
        if mark is None:
            break
        last = mark.end()
        if mark[0] == _BEGIN:
            opened = at
        elif mark[0] == _END:
            generated.append(Part(message, opened, at))
        else:
            message = int(mark[1]) if mark[1] else None
    return Written("".join(pieces), parts, generated)


def _mark_loops(body: list[Any]) -> None:
    """Adds marks to the loops whose text nothing else reads."""
    for place, node in reversed(list(enumerate(body))):
        if isinstance(node, jinja2.nodes.If):
            for branch in (node.body, node.elif_, node.else_):
                _mark_loops(branch)
        elif isinstance(node, jinja2.nodes.For) and isinstance(node.target, jinja2.nodes.Name):
            message = jinja2.nodes.Name(node.target.name, "load")
            node.body.insert(0, _mark_output(node, [message]))
            body.insert(place + 1, _mark_output(node, []))


def _mark_output(near: jinja2.nodes.Node, arguments: list[Any]) -> jinja2.nodes.Node:
    call = jinja2.nodes.Call(jinja2.nodes.Name(_MARK, "load"), arguments, [], None, None)
    output = jinja2.nodes.Output([call]).set_lineno(near.lineno)
    return output.set_environment(near.environment)  # type: ignore[arg-type]


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: puts marks around the text between them."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("mark", [])
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def mark(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _to_json(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)


def _refuse(reason: str) -> None:
    raise jinja2.TemplateError(reason)


def _write_date(date: datetime.date | None, form: str) -> str:
    if date is None:
        raise jinja2.TemplateError("it asks for today's date, of which a run knows none")
    return date.strftime(form)
