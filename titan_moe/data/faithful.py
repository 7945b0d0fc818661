"""The form of a conversation that its chat template writes whole, and what it leaves out.

Data sets and templates differ in things that mean the same: the arguments of a call are an object
or JSON as a text, its id holds its name or not, a content is a text or a list of parts, no content
is null or "", and a system message is a developer's. The first form of which the template leaves
nothing out is taken, from the given one on: what transformers writes rightly is written as there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import product
from operator import itemgetter
from typing import Any, NamedTuple

from titan_moe.data.chat_template import ChatTemplate, Message, Talk, Written
from titan_moe.data.conversations import THOUGHTS, ChatError

KINDS = ("contents", "calls", "tools", "thoughts")
"""Kinds of parts of a conversation that a template may leave out, if a key allows it."""


class LeftOut(NamedTuple):
    """One thing that a template does not write, or not as it is."""

    kind: str
    what: str


def write_whole(
    template: ChatTemplate, talk: Talk, allowed: Collection[str] = ()
) -> tuple[Talk, Written, list[LeftOut]]:
    """Returns a conversation in the form that the template writes whole, what it writes, and what
    it leaves out, all of it of kinds that are `allowed`. ChatError if there is no such form."""
    found: list[tuple[Talk, Written, list[LeftOut]]] = []
    refused: list[tuple[float, ChatError]] = []
    for messages in _forms(talk.messages):
        form = talk._replace(messages=messages)
        try:
            written = template.write(form)
        except ChatError as error:
            refused.append((math.inf, error))
            continue
        left_out = list(_left_out(template, form, written))
        lost = [each for each in left_out if each.kind not in allowed]
        if not left_out:
            return form, written, left_out
        if not lost:
            found.append((form, written, left_out))
            continue
        allow = f", or allow it with training.messages.may_leave_out = [{lost[0].kind!r}]"
        line = f"the chat template leaves out {lost[0].what}: choose a template that has it"
        refused.append((len(lost), ChatError(line + allow * (lost[0].kind in KINDS))))
    if found:
        return min(found, key=lambda each: len(each[-1]))
    # The losses of the best form say more than another's error; of equals, the last one counts.
    raise min(reversed(refused), key=itemgetter(0))[1]


def _forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yields a conversation in all forms that mean the same, the given one first."""
    has_calls = any(message.get("tool_calls") for message in messages)
    contents: list[Callable[[Message], Message]] = [_as_given]
    if any(m.get("tool_calls") and m["content"] == "" for m in messages):
        contents.append(_without_content)
    is_plain = all(isinstance(m.get("content"), str) and m["role"] != "developer" for m in messages)
    if not is_plain or len(contents) > 1:
        contents.append(_as_plain)
    arguments = (_as_given, object_of, _as_text) if has_calls else (_as_given,)
    for rewrite, change in product(contents, arguments):
        form = [rewrite(_with_arguments(message, change)) for message in messages]
        yield form
        if has_calls:
            yield _with_named_ids(form)


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    calls = message.get("tool_calls", [])
    functions = [call["function"] for call in calls]
    new = [each | {"arguments": change(each["arguments"])} for each in functions]
    changed = [call | {"function": each} for call, each in zip(calls, new, strict=True)]
    return message | ({"tool_calls": changed} if changed else {})


def _as_plain(message: Message) -> Message:
    """A message whose content is one text, and the system in place of a developer."""
    role = "system" if message["role"] == "developer" else message["role"]
    return message | {"content": "".join(texts_of(message)), "role": role}


def _without_content(message: Message) -> Message:
    is_call = message.get("tool_calls") and not message["content"]
    return message | ({"content": None} if is_call else {})


def _as_given(given: Any) -> Any:
    return given


def _as_text(arguments: Any) -> str:
    is_text = isinstance(arguments, str)
    return arguments if is_text else json.dumps(arguments, ensure_ascii=False)


def object_of(arguments: Any) -> Any:
    """The arguments of a call that JSON holds; a text that is none stays."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _with_named_ids(messages: Sequence[Message]) -> list[Message]:
    """Messages whose calls have ids with their names, which Kimi's templates write in their place,
    as do the results in the order of the calls."""
    form: list[Message] = []
    ids: list[str] = []
    for message in messages:
        named = []
        for call in message.get("tool_calls", []):
            ids.append(f"functions.{call['function']['name']}:{len(ids)}")
            named.append(call | {"id": ids[-1]})
        form.append(message | ({"tool_calls": named} if named else {}))
        answered = sum(each["role"] == "tool" for each in form)
        if message["role"] == "tool" and answered <= len(ids):
            form[-1]["tool_call_id"] = ids[answered - 1]
    return form


def texts_of(message: Message) -> list[str]:
    """The texts of a message's content."""
    content = message.get("content")
    if isinstance(content, list):
        return [part["text"] for part in content]
    return [content] if content else []


def thought_of(message: Message) -> str:
    """The thought of a message, which comes before its answer; empty if it has none."""
    return next((str(message[name]) for name in THOUGHTS if message.get(name)), "")


def _left_out(template: ChatTemplate, talk: Talk, written: Written) -> Iterator[LeftOut]:
    """Yields the things of a conversation that the template does not write."""
    outside = written.of(None)
    said = [written.of(n) for n, each in enumerate(talk.messages) if each["role"] == "assistant"]
    for number, message in enumerate(talk.messages):
        # A first message may stand before the loop, a system's even in the next message.
        is_early = message["role"] in ("system", "developer")
        text = written.of(number) or (written.text if is_early else outside)
        name = f"message {number + 1} ({message['role']!r})"
        thought, answers = thought_of(message), texts_of(message)
        if not isinstance(message.get("content"), list):
            if len(answers) == 1 and "</think>" in answers[0] and answers[0].strip() not in text:
                inside, _, answers[0] = answers[0].rpartition("</think>")
                thought = thought or inside.rpartition("<think>")[2]
        elif str(message["content"]) in text:
            yield LeftOut("parts", f"the parts of {name}, which it writes as Python's list")
        others = str([value for value in message.values() if value is not None])
        if message.get("content", "") is None and "None" in text and "None" not in others:
            yield LeftOut("null", f"the missing content of {name}, which it writes as None")
        if not all(_is_in(answer, text) for answer in answers):
            # Allowed, it would be learned there.
            is_said = not written.of(number) and any(_is_in(answers[0], each) for each in said)
            place = ", which it writes in a message of the assistant" * is_said
            yield LeftOut("place" if is_said else "contents", f"the content of {name}{place}")
        yield from _left_out_of_calls(message, name, text)
        if thought and not _is_in(thought, text):
            # Many templates write the thoughts of the last turns alone: that is no loss.
            begun = talk._replace(messages=talk.messages[: number + 1])
            try:
                alone = template.write(begun).of(number)
            except ChatError:
                alone = ""
            if not _is_in(thought, alone):
                yield LeftOut("thoughts", f"the thought of {name}")
    names = [tool.get("function", tool).get("name", "") for tool in talk.tools or []]
    if lost := [name for name in names if name not in written.text]:
        yield LeftOut("tools", f"the tool {lost[0]!r}")


def _left_out_of_calls(message: Message, name: str, text: str) -> Iterator[LeftOut]:
    """Yields the calls of a message, and parts of them, that its text lacks."""
    functions = [call["function"] for call in message.get("tool_calls", [])]
    given = [function["arguments"] for function in functions]
    objects, once = map(object_of, given), "".join(map(_as_text, given))
    # A text that is written as JSON has a sign before each quote of its own.
    keys = {key for each in objects if isinstance(each, dict) for key in each}
    twice = any(text.count(f'\\"{key}') > once.count(f'\\"{key}') for key in keys)
    if twice or any(isinstance(each, dict) and each and str(each) in text for each in given):
        what = f"the arguments of a call in {name}, which it does not write once as JSON"
        yield LeftOut("arguments", what)
    for function in functions:
        leaves = [function["name"], *_leaves(object_of(function["arguments"]))]
        if not all(_is_in(leaf, text) for leaf in leaves):
            yield LeftOut("calls", f"a call of {function['name']!r} in {name}")


def _leaves(value: Any) -> Iterator[str]:
    """Yields the keys and values inside an object as texts."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield str(key)
            yield from _leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, str):
        yield value


def _is_in(said: str, text: str) -> bool:
    """True if a text is written, without blanks around it or as JSON writes it."""
    said = said.strip()
    return said in text or any(
        json.dumps(said, ensure_ascii=ascii_only)[1:-1] in text for ascii_only in (False, True)
    )
