"""Conversations as documents of a data set: the JSON of a record.

A record holds `messages` (objects with `role` and `content`, and `tools` beside them),
`conversations` (objects with `from` and `value`), or `prompt` and `completion`: two texts, or two
lists of messages of which only the second is learned. A message of `weight` 0 is not learned.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np

COLUMN = "conversation"
"""Name of the column of the texts that `conversation_text` makes."""
FIELDS = ("messages", "conversations", "prompt", "completion", "tools")
"""Names of a record's fields that are read."""
_ROLES = {"human": "user", "gpt": "assistant"}


class ChatError(ValueError):
    """A conversation that the template does not accept, or whose turns it does not show."""


class Spans(NamedTuple):
    """Ids of a text, and of each its first and last + 1 character."""

    ids: np.ndarray
    begins: np.ndarray
    ends: np.ndarray


def conversation_text(record: Any) -> str | None:
    """The conversation of a record as JSON, None if it holds none."""
    if not isinstance(record, dict):
        return None
    prompt: Any = record.get("prompt")
    completion: Any = record.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return json.dumps({"prompt": prompt, "completion": completion}, ensure_ascii=False)
    fields = {name: _from_json(record.get(name)) for name in FIELDS}
    prompt, completion = fields["prompt"], fields["completion"]
    found: dict[str, Any] = {}
    if _is_chat(prompt) and _is_chat(completion):
        found = {"messages": prompt + completion, "learned_from": len(prompt)}
    elif _is_chat(fields["messages"]):
        found = {"messages": fields["messages"]}
    elif _is_chat(fields["conversations"]):
        found = {"messages": [_message(each) for each in fields["conversations"]]}
    if not found:
        return None
    if fields["tools"]:
        found["tools"] = fields["tools"]
    return json.dumps(found, ensure_ascii=False)


def without_nulls(value: Any) -> Any:
    """A record of Arrow, whose structs have all fields that any record has, without empty ones."""
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


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


def _message(said: dict[str, Any]) -> dict[str, Any]:
    """A message from an object with `from` and `value`."""
    if "from" not in said:
        return said
    message = {"role": _ROLES.get(said["from"], said["from"]), "content": said.get("value", "")}
    return message | {"weight": said["weight"]} if "weight" in said else message
