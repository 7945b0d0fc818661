"""The characters of a conversation's text that a model is to learn.

Of the assistant's messages they are what it writes: what a template marks with `{% generation %}`,
else all behind the header, which is what the prompt that asks for the message ends with. Of others
they are the content. Either goes on to the token that ends the turn, whatever writes it: the
template in the turn itself, as most do, or the header of the next message.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from titan_moe.data.chat_template import EDGE, ChatTemplate, Message, Part, Talk, Written
from titan_moe.data.conversations import ChatError


class Turns(NamedTuple):
    """Finds the turns in a conversation that a template has written."""

    template: ChatTemplate
    talk: Talk
    written: Written

    def rendered(self, chosen: Collection[int], *, stop: bool) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the spans of the messages `chosen` as (first, last + 1) characters. With
        `stop` the last turn ends with the token that a further header would begin with, if the
        template ends turns so.

        ChatError if the template does not show one of the messages.
        """
        spans, text = [], self.written.text
        for number in sorted(chosen):
            if self.talk.messages[number]["role"] == "assistant":
                spans += self._answer(number)
            else:
                spans.append(self._content(number))
        if stop and not self.template.ends_turns:
            end = self._next_token()
            if spans and spans[-1][1] == len(text):
                spans[-1] = spans[-1][0], len(text + end)
            text += end
        return text, [span for span in spans if span[0] < span[1]]

    def _answer(self, number: int) -> list[tuple[int, int]]:
        """The spans of a message of the assistant."""
        if self.template.marks_targets:
            generated = self.written.generated
            if any(part.message is None for part in generated):
                raise ChatError("the chat template has {% generation %} outside its messages' loop")
            own = [(part.begin, part.end) for part in generated if part.message == number]
            return [*own[:-1], *((begin, self._ended(begin, end)) for begin, end in own[-1:])]
        part = self._part(number)
        begin = part.begin + self._header(number, part)
        return [(begin, self._ended(begin, part.end, cut=True))]

    def _part(self, number: int) -> Part:
        if part := self.written.part(number):
            return part
        raise ChatError(
            f"the chat template marks no {{% generation %}}, and does not write message "
            f"{number + 1} in one piece by a loop over messages: mark what the assistant writes"
        )

    def _header(self, number: int, part: Part) -> int:
        """Returns the length of the beginning that the prompt for a message and its part share, in
        whole lines or special tokens: a prompt may begin a thought that the turn lacks."""
        before = self.talk._replace(messages=self.talk.messages[:number])
        try:
            prompt = self.template.write(before, prompt=True)
        except ChatError:  # Some ask for a question first.
            before = self.talk
            prompt = self.template.write(before, prompt=True)
        # The prompt stands behind the loop over messages; a few templates write it inside.
        last = prompt.parts[-1]
        header = prompt.text[last.begin : last.end] if last.message is None else ""
        if not header:
            plain = self.template.write(before).text
            header = prompt.text[_common(plain, prompt.text) :]
        turn = self.written.text[part.begin : part.end]
        blank = len(turn) - len(turn.lstrip())
        header, turn = header.lstrip(), turn.lstrip()
        length = _common(header, turn)
        tokens = self.template.special.finditer(header)
        ends = {0, len(header), *(place for token in tokens for place in token.span())}
        ends |= {place + 1 for place, char in enumerate(header) if char == "\n"}
        length = max(end for end in ends if end <= length)
        return blank + length if length else 0

    def _content(self, number: int) -> tuple[int, int]:
        """The span of a message that is not the assistant's."""
        message, text = self.talk.messages[number], self.written.text
        # Templates may leave out blanks around a content.
        for edged in (_edged(message, str), _edged(message, str.strip)):
            pieces = self.template.write(self._with({number: edged})).text.split(EDGE)
            if len(pieces) == 3 and "".join(pieces) == text:
                begin, content = len(pieces[0]), len(pieces[0]) + len(pieces[1])
                own = next(p for p in self.written.parts if begin <= p.end and content <= p.end)
                return begin, self._ended(content, own.end, cut=True)
        raise ChatError(
            f"the chat template does not show the content of message {number + 1} as it is: leave "
            f"{message['role']!r} out of training.messages.targets"
        )

    def _ended(self, begin: int, end: int, *, cut: bool = False) -> int:
        """The end of a turn, with the token that ends it. cut: without a line's end behind that
        token, which is the template's, not the model's."""
        text, template = self.written.text, self.template
        bare = text[begin:end].rstrip()
        is_ended = template.ends_with_token(bare)
        if not (is_ended and template.ends_turns) and (token := template.special.match(text, end)):
            return token.end()
        return begin + len(bare) if is_ended and cut else end

    def _next_token(self) -> str:
        """The special token that the template writes first of a further message; empty if it writes
        none."""
        number = len(self.talk.messages)
        last = self.talk.messages[-1]
        role = "assistant" if last["role"] != "assistant" else "user"
        role = "tool" if last.get("tool_calls") else role
        written = self.template.write(self._with({number: {"role": role, "content": "a"}}))
        part = written.part(number)
        token = part and self.template.special.match(written.text, part.begin)
        return token[0] if token else ""

    def _with(self, messages: dict[int, Message]) -> Talk:
        """The conversation with other messages at some numbers."""
        return self.talk._replace(
            messages=[*(dict(enumerate(self.talk.messages)) | messages).values()]
        )


def _common(one: str, other: str) -> int:
    """The number of characters that two texts begin with alike."""
    if other.startswith(one):  # Nearly always, and much faster.
        return len(one)
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _edged(message: Message, strip: Any) -> Message:
    """A message with edges around its content, or around the texts of its parts together."""
    content = message["content"]
    if isinstance(content, str):
        inner = strip(content)
        return message | {"content": content.replace(inner, f"{EDGE}{inner}{EDGE}", 1)}
    parts = [dict(part) for part in content]
    parts[0]["text"] = EDGE + parts[0]["text"]
    parts[-1]["text"] += EDGE
    return message | {"content": parts}
