"""Conversations as a tokenizer's chat template writes them, and the spans that a model is to learn.

A template is untrusted code of a model's folder: it runs in jinja2's sandbox, with the functions
that transformers gives it. Two things differ. A date is the one that the caller names, so that a
resumed run reads the same tokens; and a template without `{% generation %}` has its assistant turns
found, by rendering the conversation up to each of them.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment

from titan_moe.data.conversations import ChatError, Spans
from titan_moe.data.order import digest

# Noncharacters of Unicode, which no text holds, around what a template marks as generated.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"[{_BEGIN}{_END}]")
_EDGE = "\ufdd2"  # On both sides of a content that is searched for.
_RESERVED = re.compile(f"[{_BEGIN}{_END}{_EDGE}]")
_TALK = ("user", "assistant")
_REASONING = ("reasoning_content", "thinking", "reasoning")

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
    """The common template of models without one of their own, with the tokens of a turn's ends."""
    return _CHATML.replace("BEGIN", begin).replace("END", end)


@dataclass(frozen=True)
class Rendered:
    """The text of a conversation, and the spans of its targets as (first, last + 1) characters."""

    text: str
    spans: list[tuple[int, int]]


class ChatTemplate:
    """Renders conversations, each a list of messages with `role` and `content`, and its tools."""

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str],
        *,
        special: Collection[str],
        date: datetime.date | None,
    ) -> None:
        """source: the template in Jinja. tokens: bos_token and others by these names. special: all
        texts that are one token each, whatever stands around them. date: the day that
        `strftime_now` gives; None: a template that asks is refused.

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
        self.identity = f"template={digest(source)}, date={date}"
        """All that a text depends on, beside the special tokens."""
        self._tokens = dict(tokens)
        # A tokenizer's longer names may begin with shorter ones.
        names = sorted(special, key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, names)) or "(?!)")
        """Finds special tokens in a text."""
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatError(f"the chat template is not valid: {error}") from None
        nodes = environment.parse(source).find_all(jinja2.nodes.ExtensionAttribute)
        self.marks_targets = any(node.name == "mark" for node in nodes)
        """True if the template says itself what the assistant writes."""

    def prompt(self, messages: Sequence[Any], tools: Any = None) -> str:
        """The text after which the model writes its answer to `messages`."""
        return _MARKS.sub("", self._write(_clean(messages), tools, add_generation_prompt=True))

    def render(
        self,
        messages: Sequence[Any],
        tools: Any = None,
        *,
        first: int = 0,
        roles: Collection[str] = ("assistant",),
        weight: int = 1,
    ) -> Rendered:
        """The text of a conversation; its targets are the messages of `roles` that have `weight`,
        by default 1, from message number `first` on.

        Of the assistant's messages they are what it writes, of others the content and what ends
        the turn. ChatError if the template refuses the conversation, or does not show the turns.
        """
        weights = [_weight(number, message) for number, message in enumerate(messages, 1)]
        messages = _clean(messages)
        chosen = {
            number
            for number, message in enumerate(messages)
            if number >= first and message.get("role") in roles and weights[number] == weight
        }
        pieces = _MARKS.split(self._write(messages, tools))
        text = "".join(pieces)
        answers = [n for n, message in enumerate(messages) if message.get("role") == "assistant"]
        spans: list[tuple[int, int]] = []
        if chosen.intersection(answers):
            if self.marks_targets:
                ends = [0, *accumulate(map(len, pieces))]
                # Every second piece stands between two marks.
                spans = [(ends[n], ends[n + 1]) for n in range(1, len(pieces), 2)]
            else:
                spans = list(self._turns(text, messages, tools))
            if not chosen.issuperset(answers):
                if self.marks_targets:
                    self._check_marks(messages, tools, answers, len(spans))
                spans = [span for n, span in zip(answers, spans, strict=True) if n in chosen]
        others = chosen.difference(answers)
        spans += [self._content(text, messages, tools, number) for number in others]
        return Rendered(text, sorted(span for span in spans if span[0] < span[1]))

    def _write(
        self, messages: list[Any], tools: Any, *, add_generation_prompt: bool = False
    ) -> str:
        try:
            return self._template.render(
                **self._tokens,
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ChatError(f"the chat template refuses it: {error}") from None

    def _turns(self, text: str, messages: list[Any], tools: Any) -> Iterator[tuple[int, int]]:
        """Yield the spans of the assistant's turns in `text`, the whole conversation.

        A turn begins where the prompt that asks for it ends, and ends where the conversation up to
        it does.
        """
        # A thought that `text` lacks is in prompts of the turns up to the next question.
        for number, message in enumerate(messages):
            bare = {name: value for name, value in message.items() if name not in _REASONING}
            others = [*messages[:number], bare, *messages[number + 1 :]]
            if bare != message and self._write(others, tools) == text:
                messages = others
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            given = self._write(messages[:number], tools)
            prompt = self._write(messages[:number], tools, add_generation_prompt=True)
            alone = self._write(messages[: number + 1], tools)
            # A prompt may begin a thought that the turn lacks.
            begin = self._common(prompt, text)
            is_alike = alone[:begin] == text[:begin] and begin >= self._common(given, prompt)
            length = self._found(alone[begin:], text[begin:]) if is_alike else 0
            turn = text[begin : begin + length]
            said = str(message.get("content") or "").split()[-1:]
            if not length or not all(word in turn for word in said):
                raise ChatError(
                    f"the chat template marks no {{% generation %}}, and writes message "
                    f"{number + 1}, or what comes before it, otherwise once others follow"
                )
            yield begin, begin + self._written(turn)

    def _check_marks(self, messages: list[Any], tools: Any, answers: list[int], count: int) -> None:
        """ChatError unless the template marks one span for each of the messages `answers`."""
        counts = [self._write(messages[: n + 1], tools).count(_BEGIN) for n in answers]
        if [*counts, count] != [*range(1, len(answers) + 1), len(answers)]:
            raise ChatError(
                f"the chat template marks {count} spans with {{% generation %}} for {len(answers)} "
                "messages of the assistant, some not to be learned: let it mark one for each"
            )

    def _content(self, text: str, messages: list[Any], tools: Any, number: int) -> tuple[int, int]:
        """The span in `text` of a message that is not the assistant's: from its content to the end
        of its turn, which is where the conversation up to it ends."""
        message = messages[number]
        content = message.get("content", "")
        # Templates may leave out blanks around a content.
        for inner in (content, content.strip()) if isinstance(content, str) else ():
            edged = message | {"content": content.replace(inner, f"{_EDGE}{inner}{_EDGE}", 1)}
            before = [*messages[:number], edged]
            whole, alone = (
                _MARKS.sub("", self._write(each, tools)).split(_EDGE)
                for each in (before + messages[number + 1 :], before)
            )
            if len(whole) == len(alone) == 3 and whole[1] == inner and "".join(whole) == text:
                begin, rest = len(whole[0]), inner + alone[2]
                if text.startswith(rest, begin):
                    return begin, begin + self._written(rest)
        raise ChatError(
            f"the chat template does not show the content of message {number + 1} as it is, or "
            f"joins its turn with others: leave {message.get('role')!r} out of "
            "training.messages.targets"
        )

    def _written(self, turn: str) -> int:
        """The length of a turn without a line's end behind the token that ends it, which is the
        template's, not the model's."""
        bare = turn.rstrip()
        ended = any(token.end() == len(bare) for token in self.special.finditer(bare))
        return len(bare if ended else turn)

    def _found(self, alone: str, text: str) -> int:
        """The length of a turn at the start of `text`, as the last turn is written in `alone`; 0 if
        it is not found.

        Where another turn follows, templates leave out the thought, a part of `alone` at or near
        its beginning, and may write another token at the end.
        """
        kept = self._common(alone, text)
        # What is left out ends where the text's next character stands; or nothing is.
        next_char = text[kept : kept + 1]
        for start in range(kept, len(alone) + 1):
            if alone[start : start + 1] not in ("", next_char) and start > kept:
                continue
            length = kept + self._common(alone[start:], text[kept:])
            rest = alone[start + length - kept :].strip()
            if not rest:
                return length
            if self.special.fullmatch(rest) and (end := self.special.match(text, length)):
                return end.end()
        return 0

    def _common(self, one: str, other: str) -> int:
        """The length of what two texts begin with alike, in whole special tokens."""
        if other.startswith(one):  # Nearly always, and much faster.
            return len(one)
        pairs = enumerate(zip(one, other, strict=False))
        length = next((n for n, (a, b) in pairs if a != b), len(other))
        for token in self.special.finditer(one):
            if token.start() < length < token.end():
                return token.start()
        return length


class Tokens(NamedTuple):
    """The ids of a conversation, and whether each is a target."""

    ids: np.ndarray
    is_target: np.ndarray


class Conversations:
    """Turns conversations into token ids and targets, by a chat template."""

    def __init__(
        self,
        template: ChatTemplate,
        encode: Callable[[str], Spans],
        *,
        around: tuple[np.ndarray, np.ndarray],
        targets: str | list[str],
        too_long: str,
    ) -> None:
        """around: the ids that begin and end a document without a template. targets, too_long: as
        in [training.messages]."""
        self.template = template
        self._encode, self._around = encode, around
        self._targets, self._too_long = targets, too_long
        self._roles = ["assistant"] if isinstance(targets, str) else targets
        self.template_source = template.source
        """The template in Jinja."""
        self.unseen_roles = set(self._roles)
        """Roles to be learned that no conversation has had so far."""

    @property
    def identity(self) -> str:
        """All that ids and targets depend on, beside the tokenizer and the sequence length."""
        return f"{self.template.identity}, targets={self._targets}, too_long={self._too_long}"

    def prompt(self, messages: Sequence[Any]) -> np.ndarray:
        """Ids after which the model writes its answer to `messages`; raises ChatError."""
        return self._encode(self.template.prompt(messages)).ids

    def turn_ends(self) -> list[int]:
        """Ids of the tokens that end the assistant's turns, that of a plain answer first; empty if
        the template has none."""
        try:
            said = self.template.render([{"role": who, "content": "x"} for who in _TALK])
        except ChatError:
            return []
        answer = said.text[: said.spans[-1][1]]
        last = [token[0] for token in self.template.special.finditer(answer)][-1:]
        ids: Any = self._encode(last[0]).ids if last and answer.endswith(last[0]) else []
        return [int(number) for number in ids]

    def special_inside(self, text: str) -> str | None:
        """The first special token that a conversation's JSON names, which is read as one."""
        found = self.template.special.search(text)
        return found and found[0]

    def tokens(self, text: str, seq_len: int | None = None) -> Tokens:
        """Ids and targets of a conversation's JSON, at most `seq_len` (None: all).

        ChatError if the template refuses it, or if it is too long and to be dropped.
        """
        if _RESERVED.search(text):
            raise ChatError("it holds U+FDD0, U+FDD1 or U+FDD2, which no text has")
        record = json.loads(text or "{}")
        if not record:
            raise ChatError("it is no conversation")
        messages = record.get("messages", [{"role": "assistant"}])
        self.unseen_roles -= {message.get("role") for message in messages}
        if "completion" in record:
            ids, is_target = self._plain(record["prompt"], record["completion"])
            is_target = (is_target & ("assistant" in self._roles)) | (self._targets == "all")
        else:
            ids, is_target = self._marked(record)
        if seq_len is not None and len(ids) > seq_len:
            if self._too_long == "drop":
                raise ChatError(f"its {len(ids):,} tokens are more than training.seq_len={seq_len}")
            ids, is_target = ids[:seq_len], is_target[:seq_len]
        is_target[:1] = False  # Nothing is before it that could predict it.
        return Tokens(ids.astype(np.int64), is_target)

    def _plain(self, prompt: str, completion: str) -> tuple[np.ndarray, np.ndarray]:
        ids, _, ends = self._encode(prompt + completion)
        begin, end = self._around
        known = [np.zeros(len(begin), bool), ends > len(prompt), np.ones(len(end), bool)]
        return np.concatenate([begin, ids, end]), np.concatenate(known)

    def _marked(self, record: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        messages, is_all = record["messages"], self._targets == "all"
        how: dict[str, Any] = {"first": record.get("learned_from", 0), "roles": self._roles}
        if is_all:  # But for the messages of weight 0.
            how = {"roles": [message.get("role") for message in messages], "weight": 0}
        rendered = self.template.render(messages, record.get("tools"), **how)
        ids, begins, ends = self._encode(rendered.text)
        is_inside = np.zeros(len(ids), bool)
        for begin, end in rendered.spans[-1:] if self._targets == "last" else rendered.spans:
            is_inside |= (begins < end) & (ends > begin)
        return ids, is_inside != is_all


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


def _clean(messages: Sequence[Any]) -> list[Any]:
    """Messages without weights and None, their thoughts under each name that templates read."""
    cleaned = []
    for message in messages:
        known = {name: value for name, value in message.items() if value is not None}
        known.pop("weight", None)
        thoughts = [known[name] for name in _REASONING if name in known]
        if thoughts:
            known = {"thinking": thoughts[0]} | known | {"reasoning_content": thoughts[0]}
        cleaned.append(known)
    return cleaned


def _weight(number: int, message: Mapping[str, Any]) -> int:
    """The weight of message `number`: 1 if it is to be learned, 0 if it is context alone."""
    weight = message.get("weight")
    if weight not in (None, 0, 1):
        raise ChatError(f"message {number} has weight={weight!r}: write 1 to learn it, 0 not to")
    return 1 if weight is None else int(weight)


def _to_json(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)


def _refuse(reason: str) -> None:
    raise jinja2.TemplateError(reason)


def _write_date(date: datetime.date | None, form: str) -> str:
    if date is None:
        raise jinja2.TemplateError("it asks for today's date, of which a run knows none")
    return date.strftime(form)
