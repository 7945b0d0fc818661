"""Conversations as documents of a data set: records of many forms, as JSON of one form.

A record holds one of the forms below, and beside it `tools` (or `functions`), `system`, and
`chat_template_kwargs`. Each field may be JSON as a text.

    messages, conversation      objects with `role` and `content`, as OpenAI and transformers have
                                them; Harmony's `channel` and `recipient` are thoughts and calls
    conversations               the same, or objects with `from` and `value` (ShareGPT)
    conversation                objects with `input`, `output` and `system` (XTuner)
    prompt, completion          two texts, or two lists of messages; the second one is learned
    instruction, input, output  texts (Alpaca), with `history`, a list of pairs
    question or query or prompt, and answer or response: texts
    query, answers, tools       a question and the calls that answer it (xLAM)

The form that is made has `messages` with the roles system, developer, user, assistant and tool, or
others as they are; `tools`; `learned_from`, the number of the first message to learn; `options` of
the template. A pair of texts stays `prompt` and `completion`. A record of another form is one
with `refused`, a reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

COLUMN = "conversation"
"""Name of the column of the texts that `conversation_text` makes."""
_PAIRS = (
    ("instruction", "output"),
    ("question", "answer"),
    ("query", "response"),
    ("prompt", "response"),
)
_CHATS = ("messages", "conversations", "conversation")
_PREFERENCES = ("chosen", "rejected")
FIELDS = (
    *(*_CHATS, "prompt", "completion", *_PREFERENCES),
    *("tools", "functions", "system", "chat_template_kwargs"),
    *("instruction", "input", "output", "history"),
    *("question", "answer", "query", "response", "answers"),
)
"""Names of a record's fields that are read."""
_ROLES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "chatbot", "model", "bing", "bard"), "assistant"),
    **dict.fromkeys(("observation", "function", "ipython"), "tool"),
    **dict.fromkeys(("tool_response", "function_response", "tool_result"), "tool"),
}
_CALLS = ("function_call", "tool_call")
"""Roles of a message that is a call."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that hold what the assistant thought, by the names that templates have."""


class ChatError(ValueError):
    """A conversation that cannot be read, or that the template does not write whole."""


class LeftOutError(ChatError):
    """A conversation in which nothing is to be learned, or that is too long."""


class Spans(NamedTuple):
    """Ids of a text, each with its first and last + 1 character."""

    ids: np.ndarray
    begins: np.ndarray
    ends: np.ndarray


def conversation_text(record: Any) -> str | None:
    """Returns the conversation of a record as JSON; None if it holds none."""
    if not isinstance(record, dict):
        return None
    prompt: Any = record.get("prompt")
    completion: Any = record.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        found: dict[str, Any] | None = {"prompt": prompt, "completion": completion}
    else:
        try:
            found = _read({name: _from_json(record.get(name)) for name in FIELDS})
        except ChatError as error:
            found = {"refused": str(error)}
        except (TypeError, ValueError, LookupError, AttributeError):
            found = {"refused": "its fields hold other kinds of values than a conversation has"}
    return None if found is None else json.dumps(found, ensure_ascii=False)


def without_nulls(value: Any, kind: Any, read_json: Callable[[Any], Any]) -> Any:
    """A record of Arrow, whose structs have all fields that any record has, without empty ones.
    A null that the record has itself cannot be told from those, but in JSON, which `datasets` 5
    writes where the keys of a field vary.

    Args:
        kind: the schema of the record, or the type of the value in it; None if it is not known.
        read_json: is called with a value of Arrow's JSON.
    """
    if getattr(kind, "extension_name", "") == "arrow.json":
        return value if value is None else read_json(value)
    if isinstance(value, dict):
        return {
            name: without_nulls(each, kind and kind.field(name).type, read_json)
            for name, each in value.items()
            if each is not None
        }
    inner = getattr(kind, "value_type", "")
    return [without_nulls(x, inner, read_json) for x in value] if isinstance(value, list) else value


def _read(fields: dict[str, Any]) -> dict[str, Any] | None:
    """A conversation from the fields of a record; None if they hold none. Raises ChatError."""
    learned_from = 0
    messages = next((said for name in _CHATS if (said := _said(fields[name]))), None)
    if _is_chat(fields["prompt"]) and _is_chat(fields["completion"]):
        learned_from = len(_messages(fields["prompt"]))
        messages = fields["prompt"] + fields["completion"]
    elif messages is None and all(fields[name] for name in _PREFERENCES):
        raise ChatError("it is a pair of preferences, chosen and rejected, not a conversation")
    elif messages is None:
        messages = _pair(fields)
    if messages is None:
        return None
    read = _messages(messages)
    if fields["system"] and read[0]["role"] != "system":
        read.insert(0, {"role": "system", "content": fields["system"]})
        learned_from += bool(learned_from)
    elif fields["system"] and read[0].get("content") != fields["system"]:
        raise ChatError("its `system` and its first message, of role system, are not the same")
    tools = [_function(each) for each in fields["tools"] or fields["functions"] or []]
    found = {"messages": read, "tools": tools, "learned_from": learned_from}
    found["options"] = fields["chat_template_kwargs"]
    if not all(isinstance(each, dict) for each in (*tools, fields["chat_template_kwargs"] or {})):
        raise ChatError("its tools or its chat_template_kwargs are no objects")
    return {name: value for name, value in found.items() if value}


def _from_json(value: Any) -> Any:
    """A field that holds JSON as a text, as data sets write what Arrow has no type for."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _is_chat(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(each, dict) and ({"role", "from"} & each.keys()) for each in value)


def _said(value: Any) -> list[dict[str, Any]] | None:
    """The messages that a field holds, None if it holds none."""
    if isinstance(value, dict):
        value = _from_json(value.get("messages"))
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        if _is_chat(value):
            return value
        if all({"input", "output"} <= each.keys() for each in value):
            return [message for each in value for message in _turn(each)]
    return None


def _turn(said: dict[str, Any]) -> Iterable[dict[str, Any]]:
    if said.get("system"):
        yield {"role": "system", "content": said["system"]}
    yield {"role": "user", "content": said["input"]}
    yield {"role": "assistant", "content": said["output"]}


def _pair(fields: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The messages of a question and its answer in fields of their own."""
    pairs = ((fields[question], fields[answer]) for question, answer in _PAIRS)
    found = next((p for p in pairs if all(isinstance(text, str) for text in p)), None)
    earlier = [tuple(pair) for pair in fields["history"] or []]
    if found is not None:
        question = "\n".join(filter(None, (found[0], fields["input"])))
        said = [*earlier, (question, found[1])]
        turns = ({"input": question, "output": answer} for question, answer in said)
        return [message for turn in turns for message in _turn(turn)]
    if isinstance(fields["query"], str) and isinstance(fields["answers"], list):
        call = {"role": "assistant", "tool_calls": fields["answers"]}
        return [{"role": "user", "content": fields["query"]}, call]
    return None


def _messages(said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in the form of transformers. ChatError for a call that is no JSON."""
    read: list[dict[str, Any]] = []
    thought: list[str] = []
    for number, each in enumerate(said, 1):
        message = _message(number, each)
        if message.pop("channel", None) == "analysis" and message["role"] == "assistant":
            thought.append(message["content"])
            continue
        if thought and message["role"] == "assistant":
            message["reasoning_content"] = "\n".join(thought)
            thought = []
        if message["role"] == "tool":
            calls = [call for each in read for call in each.get("tool_calls", [])]
            answered = sum(each["role"] == "tool" for each in read)
            if ids := [call["id"] for call in calls[answered : answered + 1] if "id" in call]:
                message = {"tool_call_id": ids[0]} | message
        read.append(message)
    if thought:
        raise ChatError("its last message is of the channel analysis, a thought without an answer")
    return read


def _message(number: int, said: dict[str, Any]) -> dict[str, Any]:
    """A message in the form of transformers, from one of it, of ShareGPT or of Harmony."""
    message = dict(said)
    role = str(message.pop("from", message.get("role")))
    if "value" in message and "content" not in message:
        message["content"] = message.pop("value")
    recipient = str(message.pop("recipient", None) or "")
    calls = message.get("tool_calls") or []
    if legacy := message.pop("function_call", None):
        calls = [*calls, legacy]
    if role in _CALLS:
        role, found = "assistant", _from_json(message.pop("content", None))
        calls = found if isinstance(found, list) else [found]
    elif recipient.startswith("functions."):
        name = recipient.removeprefix("functions.")
        calls = [{"name": name, "arguments": message.pop("content", None)}]
    message["role"] = _ROLES.get(role, role)
    message.pop("tool_calls", None)
    if calls := [_call(number, call) for call in _from_json(calls)]:
        message["tool_calls"] = calls
        message.setdefault("content", None)
    return message


def _call(number: int, call: Any) -> dict[str, Any]:
    """A call in OpenAI's form."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ChatError(f"message {number} calls a tool, but holds no JSON with name and arguments")
    if function is call:
        named = {name: call[name] for name in ("name", "arguments") if name in call}
        call = {name: value for name, value in call.items() if name not in named}
        function = named
    return {"type": "function", **call, "function": {"arguments": {}} | function}


def _function(tool: Any) -> Any:
    """A tool in OpenAI's form, which data sets write without its outer object."""
    is_bare = isinstance(tool, dict) and "name" in tool and "function" not in tool
    return {"type": "function", "function": tool} if is_bare else tool
