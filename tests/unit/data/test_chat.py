import datetime
import json
import random
import re

import numpy as np
import pytest

from tests.support.chat_templates import (
    SPECIAL,
    TEMPLATES,
    draw_calls,
    draw_text,
    draws,
    tokenizer_file,
    without_marks,
)
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Training
from titan_moe.config.parse import load_job, save_job
from titan_moe.data.chat import ChatError, ChatTemplate
from titan_moe.data.conversations import conversation_text
from titan_moe.data.tokenizer import load_tokenizer

TODAY = datetime.date.today()
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def template_of(text, date=TODAY):
    return ChatTemplate(text, TOKENS, special=SPECIAL, date=date)


def said(rendered):
    return [rendered.text[begin:end] for begin, end in rendered.spans]


def rendered_by(theirs, name, talk, tools):
    """Ids and mask of the assistant's tokens, as transformers has them."""
    return theirs.apply_chat_template(
        talk,
        tools=tools,
        chat_template=TEMPLATES[name],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )


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
        want = rendered_by(theirs, name, talk, tools)
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


# What ends the turns of users, systems and tools.
ENDS = {"chatml": "<|im_end|>", "thoughts": "<|im_end|>", "channels": "<|end|>"}
ENDS |= {"thought in the prompt": "", "headers": "<|eot_id|>", "no end": ""}


def conversations_of(folder, template, targets):
    (folder / "template.jinja").write_text(template)
    messages = {"template": str(folder / "template.jinja"), "date": TODAY.isoformat()}
    messages["targets"] = targets
    training = Training(dataset_format="messages", messages=messages)
    return load_tokenizer(str(folder), training).conversations


def runs(is_target):
    """The first and last + 1 place of each run of targets."""
    edges = np.flatnonzero(np.diff([False, *is_target, False]))
    return edges.reshape(-1, 2).tolist()


def draw_weighted(rng, template):
    """A conversation with weights and blanks around contents; the same without weights; tools."""
    talk, tools = draw_calls(rng)
    for message in talk:
        if "tool_calls" in message and "tool_calls" not in template:
            message["content"] = draw_text(rng)
        elif message["role"] != "assistant":
            message["content"] = rng.choice(["", " "]) + message["content"] + rng.choice(["", " "])
    weights = [rng.choice([0, 0, 1, None]) for _ in talk]
    weighted = [m | {"weight": w} for m, w in zip(talk, weights, strict=True)]
    return weighted, talk, tools


@pytest.mark.parametrize("edit", [str, without_marks])
@pytest.mark.parametrize("name", TEMPLATES)
def test_messages_of_the_roles_and_of_no_weight_0_are_learned(name, edit, folder):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **TOKENS)
    rng = random.Random(11)
    for roles in (["assistant"], ["assistant", "tool"], ["tool", "user"], ["system", "user"]):
        ours = conversations_of(folder, edit(TEMPLATES[name]), roles)
        for _ in range(40):
            weighted, talk, tools = draw_weighted(rng, TEMPLATES[name])
            want = rendered_by(theirs, name, talk, tools)
            answers = iter(runs(want["assistant_masks"]))
            texts = []
            for message in weighted:
                if message["role"] == "assistant":
                    first, last = next(answers)
                    text = theirs.decode(want["input_ids"][first:last])
                else:
                    text = message["content"]
                    text = (text.strip() if name == "headers" else text) + ENDS[name]
                if message["role"] in roles and message["weight"] != 0:
                    texts.append(text)
            ids, is_target = ours.tokens(conversation_text({"messages": weighted, "tools": tools}))
            assert ids.tolist() == want["input_ids"]
            assert [theirs.decode(ids[first:last]) for first, last in runs(is_target)] == texts


@pytest.mark.parametrize("edit", [str, without_marks])
def test_other_targets_leave_out_messages_of_weight_0(edit, folder):
    said = [("user", "q", 1), ("assistant", "a", 1), ("user", "r", 1), ("assistant", "b", 0)]
    talk = [{"role": role, "content": text, "weight": weight} for role, text, weight in said]
    wants = {
        "assistant": ["a<|im_end|>"],
        "last": ["a<|im_end|>"],
        "all": ["user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\nr"],
    }
    wants["all"] = [wants["all"][0] + "<|im_end|>\n<|im_start|>assistant\n", "\n"]
    tokenizer = load_tokenizer(str(folder), Training())
    for targets, want in wants.items():
        ours = conversations_of(folder, edit(TEMPLATES["chatml"]), targets)
        ids, is_target = ours.tokens(conversation_text({"messages": talk}))
        assert [tokenizer.decode(ids[first:last]) for first, last in runs(is_target)] == want
        # What the prompt holds is not learned, whatever its weight.
        completed = conversation_text({"prompt": talk[:2], "completion": talk[2:]})
        assert ours.tokens(completed).is_target.any() == (targets == "all")


def test_a_text_that_completes_another_is_the_assistants(folder):
    text = conversation_text({"prompt": "a", "completion": "b"})
    for roles, count in ((["tool", "assistant"], 2), (["tool"], 0)):
        is_target = conversations_of(folder, TEMPLATES["chatml"], roles).tokens(text).is_target
        assert is_target.sum() == count


def test_an_object_with_from_and_value_keeps_its_weight():
    said = {"from": "gpt", "value": "a", "weight": 0}
    talk = json.loads(conversation_text({"conversations": [said]}))["messages"]
    assert talk == [{"role": "assistant", "content": "a", "weight": 0}]


def test_each_span_belongs_to_a_message_if_one_has_no_weight():
    turn = "{% generation %}<think>{% endgeneration %}{% generation %}{{ m.content }}"
    twice = f"{{% for m in messages %}}{turn}{{% endgeneration %}}{{% endfor %}}"
    talk = [{"role": "assistant", "content": text} for text in "ab"]
    assert said(template_of(twice).render(talk)) == ["<think>", "a", "<think>", "b"]
    talk[0]["weight"] = 0
    with pytest.raises(ChatError, match=r"marks 4 spans .* for 2 messages .*let it"):
        template_of(twice).render(talk)
    # As many spans as messages, though not one each.
    first = twice.replace("{% for m in messages %}", "{% for m in messages[:1] %}")
    with pytest.raises(ChatError, match="marks 2 spans"):
        template_of(first).render(talk)


@pytest.mark.parametrize("weight", [2, -1, 0.5, "0", [0]])
def test_a_weight_is_0_or_1(weight):
    talk = draws(1, 1)[0]
    talk[-1]["weight"] = weight
    line = re.escape(f"message {len(talk)} has weight={weight!r}: write 1")
    with pytest.raises(ChatError, match=line):
        template_of(TEMPLATES["chatml"]).render(talk)


# Results of tools as Qwen's templates write them, those in a row in one block.
RESULTS = """\
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<result>\\n' + m.content + '\\n</result>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}"""
ONE = [{"role": "user", "content": "e"}, {"role": "tool", "content": "e"}]
HIDDEN = {
    "joined": (RESULTS, [*ONE, {"role": "tool", "content": "f"}], 2),
    "repeated": ("{% for m in messages %}[{{ m.content * 2 }}]{% endfor %}", ONE, 2),
    "escaped": (
        "{{ messages[1].content | tojson }}",
        [ONE[0], {"role": "tool", "content": '"'}],
        2,
    ),
    "other": ("{{ messages[1].content | upper }}", ONE, 2),
    "left out": ("{{ messages[0].content }}", ONE, 2),
    "no text": ("{{ messages[1].content }}", [ONE[0], {"role": "tool", "content": [ONE[0]]}], 2),
}


def test_a_result_of_a_tool_ends_where_its_turn_does():
    rendered = template_of(RESULTS).render([*ONE, ONE[0]], roles=["tool"])
    assert said(rendered) == ["e\n</result><|im_end|>"]
    assert rendered.text[: rendered.spans[0][0]].endswith("<|im_start|>user\n<result>\n")


@pytest.mark.parametrize("name", HIDDEN)
def test_a_content_that_a_template_does_not_show_is_refused(name):
    template, talk, number = HIDDEN[name]
    with pytest.raises(ChatError, match=f"message {number} .*leave 'tool' out of training.mess"):
        template_of(template).render(talk, roles=["tool"])


def test_a_turn_after_another_of_the_assistant_has_no_header():
    talk = [{"role": "assistant", "content": text} for text in "ab"]
    for name in TEMPLATES:
        marked, plain = template_of(TEMPLATES[name]), template_of(without_marks(TEMPLATES[name]))
        try:
            assert said(plain.render(talk)) == said(marked.render(talk))
        except ChatError:
            assert name == "channels"  # The first one's turn ends otherwise.


@pytest.mark.parametrize("text", ["assistant,tool", '["assistant", "tool"]'])
def test_roles_are_a_list_of_a_command_line_and_of_a_file(text, tmp_path):
    job = load_job(["--training.messages.targets", text])
    assert job.training.messages.targets == ["assistant", "tool"]
    save_job(job, tmp_path / "job.toml")
    assert load_job(["--job.config_file", str(tmp_path / "job.toml")]) == job


@pytest.mark.parametrize("value", ['"tool"', "[]", "[1]", "1"])
def test_targets_are_names_or_a_list_of_roles(value, tmp_path):
    (tmp_path / "job.toml").write_text(f"[training.messages]\ntargets = {value}\n")
    with pytest.raises(ConfigError) as error:
        load_job(["--job.config_file", str(tmp_path / "job.toml")])
    assert len(error.value.lines) == 1
    assert f"training.messages.targets = {value} (" in error.value.lines[0]
    assert "must be 'assistant', 'last', 'all' or a list of roles" in error.value.lines[0]
