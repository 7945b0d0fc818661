import datetime
import random

import pytest

from tests.support.chat_templates import (
    SPECIAL,
    TEMPLATES,
    draw_calls,
    draws,
    tokenizer_file,
    without_marks,
)
from titan_moe.config.job_config import Training
from titan_moe.data.chat import ChatError, ChatTemplate
from titan_moe.data.conversations import conversation_text
from titan_moe.data.tokenizer import load_tokenizer

TODAY = datetime.date.today()
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def template_of(text, date=TODAY):
    return ChatTemplate(text, TOKENS, special=SPECIAL, date=date)


def said(rendered):
    return [rendered.text[begin:end] for begin, end in rendered.spans]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer_file(folder, bos_token="<s>")
    return folder


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_targets_of_500_conversations_are_those_of_transformers(name, folder):
    from transformers import PreTrainedTokenizerFast

    (folder / "template.jinja").write_text(TEMPLATES[name])
    messages = {"template": str(folder / "template.jinja"), "date": TODAY.isoformat()}
    training = Training(dataset_format="messages", messages=messages)
    conversations = load_tokenizer(str(folder), training).conversations
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **TOKENS)
    rng = random.Random(7)
    drawn = [(each, None) for each in draws(1, 500)]
    if "tools" in TEMPLATES[name]:
        drawn[400:] = [draw_calls(rng) for _ in range(100)]
    for talk, tools in drawn:
        want = theirs.apply_chat_template(
            talk,
            tools=tools,
            chat_template=TEMPLATES[name],
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        text = conversation_text({"messages": talk, "tools": tools})
        ids, is_target = conversations.tokens(text)
        assert ids.tolist() == want["input_ids"]
        assert is_target.tolist() == [mask == 1 for mask in want["assistant_masks"]]
        assert is_target.any()
        prompt = theirs.apply_chat_template(
            talk[:-1], chat_template=TEMPLATES[name], add_generation_prompt=True
        )
        assert conversations.prompt(talk[:-1]).tolist() == prompt["input_ids"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_of_a_template_without_marks_are_those_of_the_template_with_marks(name):
    marked, plain = template_of(TEMPLATES[name]), template_of(without_marks(TEMPLATES[name]))
    assert marked.marks_targets and not plain.marks_targets
    for talk in draws(2, 200):
        assert said(plain.render(talk)) == said(marked.render(talk))
        assert plain.render(talk).text == marked.render(talk).text


def test_calls_of_tools_are_turns_of_the_assistant():
    rng = random.Random(3)
    marked, plain = (template_of(edit(TEMPLATES["thoughts"])) for edit in (str, without_marks))
    for _ in range(50):
        talk, tools = draw_calls(rng)
        assert said(plain.render(talk, tools)) == said(marked.render(talk, tools))


def test_a_template_that_writes_earlier_turns_otherwise_is_refused():
    backwards = "{% for m in messages[::-1] %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    talk = [
        {"role": r, "content": c} for r, c in zip(["user", "assistant"] * 2, "abcd", strict=True)
    ]
    with pytest.raises(ChatError, match="writes message 2, or what comes before it, otherwise"):
        template_of(backwards).render(talk)


def test_a_template_that_asks_for_a_date_is_refused_without_one():
    with pytest.raises(ChatError, match="today's date"):
        template_of(TEMPLATES["channels"], date=None).render(draws(1, 1)[0])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{% for %}", "is not valid"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.__class__.mro() }}", "unsafe"),
    ],
)
def test_a_template_that_fails_says_why(text, problem):
    with pytest.raises(ChatError, match=problem):
        template_of(text).render(draws(1, 1)[0])


def test_messages_before_a_completion_are_not_learned():
    talk = draws(5, 40)
    for template in (TEMPLATES["chatml"], without_marks(TEMPLATES["chatml"])):
        for messages in talk:
            whole = template_of(template).render(messages)
            last = template_of(template).render(messages, first=len(messages) - 1)
            assert last.spans == whole.spans[-1:]


def test_a_turn_after_another_of_the_assistant_has_no_header():
    talk = [{"role": "assistant", "content": text} for text in "ab"]
    for name in TEMPLATES:
        marked, plain = template_of(TEMPLATES[name]), template_of(without_marks(TEMPLATES[name]))
        try:
            assert said(plain.render(talk)) == said(marked.render(talk))
        except ChatError:
            assert name == "channels"  # The first one's turn ends otherwise.
