"""Token ids and targets of conversations, by a tokenizer's chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from titan_moe.config.job_config import Messages
from titan_moe.data.batch import Encoded
from titan_moe.data.chat_template import RESERVED, ChatTemplate, Message, Talk, Written
from titan_moe.data.conversations import ChatError, LeftOutError, Spans, conversation_text
from titan_moe.data.faithful import LeftOut, texts_of, thought_of, write_whole
from titan_moe.data.turns import Turns

_KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")
_FLAGS = ("weight", "loss", "train", "trainable", "training", "loss_mask")
"""Keys of a message that say whether it is learned: 1 or true, 0 or false."""
_LOOKS_LIKE_A_FLAG = re.compile("loss|train|learn|mask|weight|supervis")


class Conversations:
    """Turns conversations into token ids and targets, by a chat template."""

    def __init__(
        self,
        template: ChatTemplate,
        with_tools: ChatTemplate,
        encode: Callable[[str], Spans],
        around: tuple[np.ndarray, np.ndarray],
        keys: Messages,
    ) -> None:
        """
        Args:
            with_tools: the template of conversations with tools.
            around: the ids that begin and end a document without a template.
        """
        self.template, self._with_tools = template, with_tools
        self._encode, self._around, self._keys = encode, around, keys
        self.max_refused = keys.max_refused
        """The largest share of a source's conversations that may be refused."""
        self._roles = ["assistant"] if isinstance(keys.targets, str) else keys.targets
        self.unseen_roles = set(self._roles)
        """Roles to be learned that no conversation has had so far."""
        self.unread_flags: set[str] = set()
        """Keys of messages so far that look like a flag of what is learned, and are not read."""

    @property
    def identity(self) -> str:
        """All that ids and targets depend on, beside the tokenizer and the sequence length."""
        templates = dict.fromkeys([self.template.identity, self._with_tools.identity])
        keys = self._keys
        how = f"targets={keys.targets}, too_long={keys.too_long}, left_out={keys.may_leave_out}"
        return f"{'; '.join(templates)}, {how}"

    def turn_ends(self) -> list[int]:
        """The ids that end an answer, and a call of a tool if another one does; none if the
        template ends turns with no special token."""
        call = {"name": "f", "arguments": {}}
        answers = {"content": "a"}, {"content": "", "tool_calls": [call]}
        ends: list[int] = []
        for answer in answers:
            talk = [{"role": "user", "content": "a"}, {"role": "assistant", **answer}]
            record = json.loads(conversation_text({"messages": talk}) or "")
            try:
                text, spans = self._rendered(record, {1}, stop=True)
            except ChatError:
                continue
            turn = text[: spans[-1][1]].rstrip() if spans else ""
            if self.template.ends_with_token(turn):
                ends.append(int(self._encode(turn).ids[-1]))
        return list(dict.fromkeys(ends))

    def prompt(self, messages: Sequence[Any], tools: Any = None) -> np.ndarray:
        """Returns the ids that the model's answer to `messages` follows. Raises ChatError."""
        record = json.loads(conversation_text({"messages": messages, "tools": tools}) or "{}")
        if not record.get("messages"):
            raise ChatError(record.get("refused", "it holds no messages with role and content"))
        template, (talk, _, _) = self._written(record)
        return self._encode(template.write(talk, prompt=True).text).ids

    def notes(self) -> list[str]:
        """Lines about a template without an end of turns, and about keys that are not read."""
        lines = []
        if not self.turn_ends():
            lines.append(
                "training.messages.template: no special token ends the assistant's turns, so that "
                "the model does not learn to stop: choose a template that ends them"
            )
        for name in sorted(self.unread_flags):
            known = ", ".join(_FLAGS)
            lines.append(
                f"training.messages: messages have {name!r}, which is not read: say with one of "
                f"{known} which messages are learned"
            )
        return lines

    def special_inside(self, text: str) -> str | None:
        """The first special token that a conversation's JSON names, which is read as one."""
        found = self.template.special.search(text)
        return found and found[0]

    def left_out(self, text: str) -> list[LeftOut]:
        """Lists what the template leaves out of a conversation's JSON, all of it allowed."""
        record = json.loads(text)
        if "messages" not in record:
            return []
        return self._written(record)[1][2]

    def encode(self, name: str, text: str, seq_len: int | None = None) -> Encoded:
        """Ids and targets of a conversation's JSON, at most `seq_len` (None: all).

        ChatError if it cannot be read, or if the template refuses it or leaves out some of it;
        LeftOutError if it is too long and to be dropped.
        """
        if RESERVED.search(text):
            raise ChatError("it holds a character from U+FDD0 to U+FDD4, which no text has")
        record = json.loads(text or "{}")
        if not record:
            raise ChatError("it is no conversation")
        if "refused" in record:
            raise ChatError(record["refused"])
        messages = record.get("messages", [{"role": "assistant"}])
        self.unseen_roles -= {message.get("role") for message in messages}
        if "completion" in record:
            ids, is_target = self._plain(record["prompt"], record["completion"])
            is_target = (is_target & ("assistant" in self._roles)) | (self._keys.targets == "all")
        else:
            ids, is_target = self._marked(record)
        cut = 0 if seq_len is None else max(0, len(ids) - seq_len)
        if cut:
            if self._keys.too_long == "drop":
                line = f"its {len(ids):,} tokens are more than training.seq_len={seq_len}"
                raise LeftOutError(line)
            ids, is_target = ids[:seq_len], is_target[:seq_len]
        is_target[:1] = False  # Nothing is before it that could predict it.
        return Encoded(name, ids.astype(np.int64), is_target, cut)

    def _plain(self, prompt: str, completion: str) -> tuple[np.ndarray, np.ndarray]:
        ids, _, ends = self._encode(prompt + completion)
        begin, end = self._around
        known = [np.zeros(len(begin), bool), ends > len(prompt), np.ones(len(end), bool)]
        return np.concatenate([begin, ids, end]), np.concatenate(known)

    def _marked(self, record: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        messages, is_all = record["messages"], self._keys.targets == "all"
        first = 0 if is_all else record.get("learned_from", 0)
        learned: list[int] = []
        for number, message in enumerate(messages):
            is_learned = self._is_learned(number + 1, message) and number >= first
            if is_learned and (is_all or message["role"] in self._roles):
                _refuse_empty(number + 1, message)
                learned.append(number)
        if self._keys.targets == "last":
            learned = learned[-1:]
        # With targets = "all" the spans are those of what is not learned.
        chosen = {*range(len(messages))}.difference(learned) if is_all else learned
        text, spans = self._rendered(record, chosen, stop=len(messages) - 1 in learned)
        ids, begins, ends = self._encode(text)
        is_inside = np.zeros(len(ids), bool)
        for begin, end in spans:
            is_inside |= (begins < end) & (ends > begin)
        return ids, is_inside != is_all

    def _is_learned(self, number: int, message: Message) -> bool:
        """False for a message that is context alone. ChatError if its role, content or flags cannot
        be read."""
        role, content = message.get("role"), message.get("content")
        if role not in (*_KNOWN_ROLES, *self._roles):
            raise ChatError(
                f"message {number} has the role {role!r}: write one of {', '.join(_KNOWN_ROLES)}"
            )
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ChatError(f"message {number} has a part of type {kind!r}: only text is read")
        if not isinstance(content, str | list | None):
            kind = type(content).__name__
            raise ChatError(f"message {number} has a content of type {kind!r}: write a text")
        if content in (None, []) and not message.get("tool_calls") and not thought_of(message):
            raise ChatError(f"message {number} ({role!r}) has no content")
        flags = {name: message[name] for name in _FLAGS if message.get(name) is not None}
        for name, value in flags.items():
            if value not in (0, 1):
                line = f"message {number} has {name}={value!r}"
                raise ChatError(f"{line}: write 1 or true to learn it, 0 or false not to")
        if len({bool(value) for value in flags.values()}) > 1:
            raise ChatError(f"message {number} has {flags}, which do not agree")
        like = (name for name in message if _LOOKS_LIKE_A_FLAG.search(name))
        self.unread_flags.update(name for name in like if name not in _FLAGS)
        return all(flags.values())

    def _written(
        self, record: dict[str, Any]
    ) -> tuple[ChatTemplate, tuple[Talk, Written, list[LeftOut]]]:
        """Returns the template of a record, and the result of `write_whole`."""
        template = self._with_tools if record.get("tools") else self.template
        talk = Talk(_clean(record["messages"]), record.get("tools"), record.get("options"))
        return template, write_whole(template, talk, self._keys.may_leave_out)

    def _rendered(
        self, record: dict[str, Any], chosen: Collection[int], *, stop: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        template, (talk, written, _) = self._written(record)
        return Turns(template, talk, written).rendered(chosen, stop=stop)


def _clean(messages: Sequence[Message]) -> list[Message]:
    """Returns messages without flags and without None (a content may be None); thoughts stand under
    each name that templates read."""
    cleaned = []
    for message in messages:
        known = {
            name: value
            for name, value in message.items()
            if (value is not None or name == "content") and name not in _FLAGS
        }
        if thought := thought_of(known):
            known = {"thinking": thought} | known | {"reasoning_content": thought}
        cleaned.append(known)
    return cleaned


def _refuse_empty(number: int, message: Message) -> None:
    """Raises ChatError for a turn of the assistant that says nothing."""
    said = [*texts_of(message), thought_of(message)]
    is_empty = not "".join(said).strip() and not message.get("tool_calls")
    if message["role"] == "assistant" and is_empty:
        raise ChatError(f"message {number} ('assistant') is empty: mend it, or give it weight 0")
