"""Chat templates: ids, turns and targets of conversations, and what a template leaves out."""

import json
import random
import re
from unittest import mock

import numpy as np
import pytest

from tests.support.chat_templates import (
    ALL,
    FORMATS,
    LEARNED,
    TEMPLATES,
    TODAY,
    WITHOUT_TOOLS,
    conversations_of,
    draw_calls,
    draw_text,
    draws,
    runs,
    said,
    tokens_of,
    without_marks,
)
from tests.support.conversations import talk
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Training
from titan_moe.data.conversations import ChatError, conversation_text
from titan_moe.data.tokenizer import load_tokenizer

EDITS = pytest.mark.parametrize("edit", [str, without_marks])
QUESTION = {"role": "user", "content": "q"}


@pytest.fixture(scope="module")
def theirs(folder):
    from transformers import PreTrainedTokenizerFast

    names = {"bos_token": "<s>", "eos_token": "</s>"}
    with mock.patch("transformers.utils.chat_template_utils.datetime", now=lambda: TODAY):
        yield PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **names)


def rendered_by(theirs, name, record, **how):
    """Returns ids and targets as transformers has them, with the token that ends each turn."""
    messages = json.loads(conversation_text(record))["messages"]
    for message in messages:
        if thought := message.get("reasoning_content"):
            message["thinking"] = thought
        for call in message.get("tool_calls", []) if name == "deepseek_v3" else ():
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        message.update({"tool_call_id": "functions.f:0"} if message["role"] == "tool" else {})
        for call in message.get("tool_calls", []):
            call["id"] = "functions.f:0"
    how = {"chat_template": TEMPLATES[name], "tools": record.get("tools")} | how
    found = theirs.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True, **how
    )
    ids, mask = found["input_ids"], found["assistant_masks"]
    if name == "glm4_5":  # The next header's token ends a turn.
        for _, end in runs(mask):
            ids[end:] = ids[end:] or [theirs.convert_tokens_to_ids("<|user|>")]
            mask[end : end + 1] = [1]
    return ids, [each == 1 for each in mask]


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_targets_of_drawn_conversations_are_those_of_transformers(name, folder, theirs):
    conversations = conversations_of(folder, TEMPLATES[name], may_leave_out=ALL)
    rng = random.Random(7)
    drawn = [(each, None) for each in draws(1, 120)]
    if name not in WITHOUT_TOOLS:
        drawn[80:] = [draw_calls(rng) for _ in range(40)]
    for messages, tools in drawn:
        record = {"messages": messages, "tools": tools}
        ids, is_target = tokens_of(conversations, record)
        want_ids, want = rendered_by(theirs, name, record)
        assert ids.tolist() == want_ids and is_target.tolist() == want and is_target.any()
        if not tools:
            asked = {"messages": messages[:-1]}
            prompt, _ = rendered_by(theirs, name, asked, add_generation_prompt=True)
            assert conversations.prompt(messages[:-1]).tolist() == prompt


@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_of_a_template_without_marks_are_those_of_the_template_with_marks(name, folder):
    marked, plain = (
        conversations_of(folder, edit(TEMPLATES[name]), may_leave_out=ALL)
        for edit in (str, without_marks)
    )
    assert marked.template.marks_targets and not plain.template.marks_targets
    rng = random.Random(3)
    drawn = [(each, None) for each in draws(2, 60)]
    drawn += [draw_calls(rng) for _ in range(30 * (name not in WITHOUT_TOOLS))]
    for messages, tools in drawn:
        record = {"messages": messages, "tools": tools}
        assert np.array_equal(tokens_of(marked, record), tokens_of(plain, record))


@pytest.mark.parametrize("record", FORMATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_records_as_people_have_them_are_learned_or_refused(name, record, folder):
    want = LEARNED[name][record]
    for edit in (str, without_marks):
        conversations = conversations_of(folder, edit(TEMPLATES[name]))
        if isinstance(want, list):
            assert said(folder, conversations, FORMATS[record]) == want
        else:
            with pytest.raises(ChatError, match=re.escape(want.removeprefix("refused: "))):
                said(folder, conversations, FORMATS[record])


def test_a_template_that_no_loop_over_messages_writes_is_refused(folder):
    by_number = (
        "{% for i in range(2) %}[{{ messages[i].role }}]{{ messages[i].content }}{% endfor %}"
    )
    with pytest.raises(ChatError, match="does not write message 2 in one piece by a loop"):
        said(folder, conversations_of(folder, by_number), {"messages": talk("q", "a")})


def test_a_template_that_writes_messages_backwards_shows_its_turns(folder):
    backwards = "{% for m in messages[::-1] %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
    backwards += "{% if add_generation_prompt %}[assistant]{% endif %}"
    record = {"messages": talk("q", "a") + talk("r", "b")}
    assert said(folder, conversations_of(folder, backwards), record) == ["b</s>", "a</s>"]


def test_a_template_that_asks_for_a_date_is_refused_without_one(folder):
    conversations = conversations_of(folder, TEMPLATES["gpt_oss"], date=None)
    with pytest.raises(ChatError, match="today's date"):
        said(folder, conversations, {"messages": talk("q", "a")})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.__class__.mro() }}", "unsafe"),
    ],
)
def test_a_template_that_fails_says_why(text, problem, folder):
    with pytest.raises(ChatError, match=problem):
        said(folder, conversations_of(folder, text), {"messages": talk("q", "a")})
    with pytest.raises(ConfigError, match=r"template.jinja': the chat template is not valid"):
        conversations_of(folder, "{% for %}")


@EDITS
def test_messages_before_a_completion_are_not_learned(edit, folder):
    conversations = conversations_of(folder, edit(TEMPLATES["chatml"]), may_leave_out=ALL)
    for messages in draws(5, 40):
        whole = said(folder, conversations, {"messages": messages})
        completed = {"prompt": messages[:-1], "completion": messages[-1:]}
        assert said(folder, conversations, completed) == whole[-1:]


# Ends of the turns of systems, users and tools, in the template itself or in the next header.
ENDS = {
    name: dict.fromkeys(("system", "user", "tool"), "<|im_end|>") for name in ("chatml", "qwen3")
}
ENDS["qwen3"]["tool"] = "\n</tool_response><|im_end|>"
ENDS["llama3"] = dict.fromkeys(("system", "user", "tool"), "<|eot_id|>")
ENDS["deepseek_v3"] = {"system": "<|User|>", "user": "<|Assistant|>", "tool": "<|output_end|>"}
ENDS["glm4_5"] = {"system": "<|user|>", "user": "<|assistant|>"}
ENDS["glm4_5"]["tool"] = "\n</tool_response><|assistant|>"


def draw_weighted(rng, name):
    """A conversation with weights and blanks around contents; the same without weights."""
    messages, _ = draw_calls(rng)
    for message in messages:
        if "tool_calls" in message and name in WITHOUT_TOOLS:
            message["content"] = draw_text(rng)
            message.pop("tool_calls")
        elif message["role"] != "assistant":
            message["content"] = rng.choice(["", " "]) + message["content"] + rng.choice(["", " "])
    weights = [rng.choice([0, 0, 1, None]) for _ in messages]
    return [m | {"weight": w} for m, w in zip(messages, weights, strict=True)], messages


@EDITS
@pytest.mark.parametrize("name", ENDS)
def test_messages_of_the_roles_and_of_no_weight_0_are_learned(name, edit, folder, theirs):
    rng = random.Random(11)
    for roles in (["assistant"], ["assistant", "tool"], ["tool", "user"], ["system", "user"]):
        ours = conversations_of(folder, edit(TEMPLATES[name]), roles, may_leave_out=ALL)
        for _ in range(15):
            weighted, messages = draw_weighted(rng, name)
            ids, is_answer = rendered_by(theirs, name, {"messages": messages})
            answers, texts = iter(runs(is_answer)), []
            for message in weighted:
                text = message["content"]
                if message["role"] == "assistant":
                    first, last = next(answers)
                    text = theirs.decode(ids[first:last])
                else:
                    text = text.strip() if name == "llama3" else text
                    text += ENDS[name][message["role"]]
                texts.append(text * (message["role"] in roles and message["weight"] != 0))
            found, is_target = tokens_of(ours, {"messages": weighted})
            assert found.tolist() == ids[: len(found)] and len(ids) - len(found) <= 1
            assert theirs.decode(found[is_target]) == "".join(texts)


@EDITS
@pytest.mark.parametrize("targets", ["assistant", "all", "last"])
def test_a_next_header_that_ends_turns_ends_the_last_one(targets, edit, folder):
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}
    ours = conversations_of(folder, edit(TEMPLATES["glm4_5"]), targets)
    for answer, end in ((talk("q", "a")[1], "<|user|>"), (call, "<|observation|>")):
        *_, last = said(folder, ours, {"messages": [QUESTION, answer]})
        assert last.endswith(end)
        context = [QUESTION, answer | {"weight": 0}]
        *_, last = said(folder, ours, {"messages": [*context, *talk("r", "a")]})
        assert last.endswith("a<|user|>") and (targets == "all") == last.startswith("\nr")


def test_the_ends_of_turns_are_known_and_their_lack_is_said(folder):
    tokenizer = load_tokenizer(str(folder), Training())
    ends = {name: ["</s>"] for name in ("deepseek_r1", "deepseek_v3", "mixtral")}
    ends |= {name: ["<|im_end|>"] for name in ("chatml", "qwen3", "qwen3_5", "kimi_k2")}
    ends |= {"gpt_oss": ["<|return|>", "<|call|>"], "glm4_5": ["<|user|>", "<|observation|>"]}
    ends |= {"llama3": ["<|eot_id|>"], "llama4": ["<|eot|>"], "minimax_m2": ["[e~["]}
    for name, want in ends.items():
        ours = conversations_of(folder, TEMPLATES[name])
        assert [tokenizer.decode([end]) for end in ours.turn_ends()] == want, name
        assert not ours.notes()
    endless = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (line,) = conversations_of(folder, endless).notes()
    assert "no special token ends the assistant's turns" in line


def test_all_that_a_template_marks_of_a_message_is_learned_with_it(folder):
    turn = "{% generation %}<think>{% endgeneration %}{% generation %}{{ m.content }}"
    twice = f"{{% for m in messages %}}{turn}{{% endgeneration %}}.{{% endfor %}}"
    messages = [{"role": "assistant", "content": text} for text in "ab"]
    assert said(folder, conversations_of(folder, twice), {"messages": messages})[1:] == ["<think>b"]
    messages[1]["weight"] = 0
    assert said(folder, conversations_of(folder, twice), {"messages": messages}) == ["a"]
    inside = "{{ messages[1].content }}{% generation %}{{ messages[0].content }}{% endgeneration %}"
    with pytest.raises(ChatError, match="outside its messages' loop"):
        said(folder, conversations_of(folder, inside), {"messages": messages})


BARE = "{% for m in messages %}{{ m.role }}:{{ m.content }}</s>{% endfor %}"
LOST = {
    "the content of message 1 ('user')": (BARE.replace("{{ m.content }}", ""), {}),
    "the thought of message 2 ('assistant')": (BARE, {"reasoning_content": "hm"}),
    "a call of 'f' in message 2 ('assistant')": (BARE, {"tool_calls": [{"name": "f"}]}),
    "the tool 'g'": (BARE, {}),
    "which it does not write once as JSON": (
        BARE.replace("</s>", "{% for c in m.tool_calls %}{{ c | tojson | tojson }}{% endfor %}"),
        {"tool_calls": [{"name": "f", "arguments": {"x": None}}]},
    ),
    "which it writes in a message of the assistant": (
        "{% for m in messages if m.role == 'assistant' %}{{ messages[0].content + m.content }}"
        "{% endfor %}",
        {},
    ),
}


@pytest.mark.parametrize("what", LOST)
def test_what_a_template_leaves_out_is_refused_or_allowed(what, folder):
    template, more = LOST[what]
    answer = {"role": "assistant", "content": "a", **more}
    record = {"messages": [{"role": "user", "content": "quest"}, answer]}
    if "tool 'g'" in what:
        record["tools"] = [{"name": "g"}]
    with pytest.raises(ChatError, match=re.escape(what)) as error:
        said(folder, conversations_of(folder, template), record)
    ours = conversations_of(folder, template, may_leave_out=ALL)
    if "may_leave_out" in str(error.value):
        assert said(folder, ours, record)
        (left_out,) = ours.left_out(conversation_text(record))
        assert left_out.what == what
    else:
        with pytest.raises(ChatError, match=re.escape(what)):
            said(folder, ours, record)


def test_an_earlier_thought_that_the_template_knows_is_no_loss(folder):
    thinking = [
        each | {"reasoning_content": f"hm {each['content']}"} for each in talk("q", "a")[1:]
    ]
    messages = [QUESTION, *thinking, QUESTION, *thinking]
    ours = conversations_of(folder, without_marks(TEMPLATES["qwen3"]))
    first, last = said(folder, ours, {"messages": messages})
    assert first == "a<|im_end|>" and last == "<think>\nhm a\n</think>\n\na<|im_end|>"
    assert not ours.left_out(conversation_text({"messages": messages}))


def test_a_form_that_loses_nothing_goes_before_a_loss_that_is_allowed(folder):
    ours = conversations_of(folder, TEMPLATES["kimi_k2"], may_leave_out=ALL)
    call = {"id": "call_1", "function": {"name": "f", "arguments": "{}"}}
    (turn,) = said(
        folder, ours, {"messages": [QUESTION, {"role": "assistant", "tool_calls": [call]}]}
    )
    assert "<|call_begin|>functions.f:0<|argument_begin|>{}" in turn


@EDITS
def test_answers_in_a_row_and_thoughts_that_a_prompt_begins_are_found(edit, folder):
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    messages = [QUESTION, call, {"role": "tool", "content": "t"}, *talk("", "a")[1:]]
    messages += [QUESTION, *talk("", "<think>\nhm\n</think>\n\nb")[1:], *talk("", "c")[1:]]
    for name in ("qwen3", "qwen3_5"):
        ours = conversations_of(folder, edit(TEMPLATES[name]))
        _, a, *rest = said(folder, ours, {"messages": messages})
        assert a == "a<|im_end|>" and rest[-1].endswith("</think>\n\nc<|im_end|>")
        assert rest[0].endswith("hm\n</think>\n\nb<|im_end|>") and len(rest) == 2


# Results of tools as Qwen's templates write them, those in a row in one block.
ONE = [{"role": "user", "content": "e"}, {"role": "tool", "content": "e"}]
TWO = [*ONE, {"role": "tool", "content": "f"}]
HIDDEN = {
    "repeated": ("{% for m in messages %}[{{ m.content * 2 }}]{% endfor %}", ONE),
    "other": ("{% for m in messages %}{{ m.content }}{{ m.content | upper }}{% endfor %}", ONE),
}


def test_a_result_of_a_tool_ends_where_its_turn_does(folder):
    ours = conversations_of(folder, TEMPLATES["qwen3"], ["tool"])
    end = "\n</tool_response>"
    assert said(folder, ours, {"messages": [*ONE, ONE[0]]}) == [f"e{end}<|im_end|>"]
    assert said(folder, ours, {"messages": TWO}) == [f"e{end}", f"f{end}<|im_end|>"]


@pytest.mark.parametrize("name", HIDDEN)
def test_a_content_that_a_template_does_not_show_is_refused(name, folder):
    template, messages = HIDDEN[name]
    with pytest.raises(ChatError, match=r"message 2 .*leave 'tool' out of training.mess"):
        said(folder, conversations_of(folder, template, ["tool"]), {"messages": messages})
