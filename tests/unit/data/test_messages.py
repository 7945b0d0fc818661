"""Messages of a conversation: which are learned, which are refused, and the keys that say so."""

import json
import re

import pytest

from tests.support.chat_templates import (
    TEMPLATES,
    conversations_of,
    said,
    tokenizer_file,
    tokens_of,
    without_marks,
)
from tests.support.conversations import talk
from tests.support.refusals import config_file, refusal
from titan_moe.config.job_config import Training
from titan_moe.config.parse import load_job, save_job
from titan_moe.data.conversations import ChatError, conversation_text
from titan_moe.data.tokenizer import load_tokenizer

QUESTION = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
FLAGS = ("weight", "loss", "train", "trainable", "training", "loss_mask")


@pytest.mark.parametrize("edit", [str, without_marks])
def test_targets_leave_out_messages_of_weight_0(edit, folder):
    messages = [QUESTION, ANSWER, QUESTION, ANSWER]
    messages = [m | {"weight": weight} for m, weight in zip(messages, (1, 1, 1, 0), strict=True)]
    turn = "user\nq<|im_end|>\n<|im_start|>assistant\n"
    wants = {"assistant": ["a<|im_end|>"], "last": ["a<|im_end|>"]}
    wants["all"] = [f"{turn}a<|im_end|>\n<|im_start|>{turn}", "\n"]
    for targets, want in wants.items():
        ours = conversations_of(folder, edit(TEMPLATES["chatml"]), targets)
        assert said(folder, ours, {"messages": messages}) == want
        # What the prompt holds is not learned, whatever its weight.
        completed = {"prompt": messages[:2], "completion": messages[2:]}
        assert tokens_of(ours, completed)[1].any() == (targets == "all")


def test_completion_of_a_text_is_learned_as_the_assistants(folder):
    for roles, count in ((["tool", "assistant"], 2), (["tool"], 0)):
        ours = conversations_of(folder, TEMPLATES["chatml"], roles)
        assert tokens_of(ours, {"prompt": "a", "completion": "b"})[1].sum() == count


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_of_a_message_says_whether_it_is_learned(flag, folder):
    ours = conversations_of(folder, TEMPLATES["chatml"])
    for value, want in ((0, []), (False, []), (1, ["a<|im_end|>"]), (True, ["a<|im_end|>"])):
        assert said(folder, ours, {"messages": [QUESTION, ANSWER | {flag: value}]}) == want
        sharegpt = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", flag: value}]
        assert said(folder, ours, {"conversations": sharegpt}) == want
    for value in (2, -1, 0.5, "0", [0]):
        with pytest.raises(ChatError, match=re.escape(f"message 2 has {flag}={value!r}: write 1")):
            said(folder, ours, {"messages": [QUESTION, ANSWER | {flag: value}]})
    both = ANSWER | {flag: 0, FLAGS[FLAGS.index(flag) - 1]: 1}
    with pytest.raises(ChatError, match=r"message 2 has .*, which do not agree"):
        said(folder, ours, {"messages": [QUESTION, both]})


def test_a_key_like_a_flag_that_is_not_read_is_named(folder):
    ours = conversations_of(folder, TEMPLATES["chatml"])
    messages = [QUESTION, ANSWER | {"train_detail": [], "name": "x"}]
    assert said(folder, ours, {"messages": messages}) == ["a<|im_end|>"]
    (line,) = ours.notes()
    assert "messages have 'train_detail', which is not read" in line


ROLES = {
    "user": ("human", "user", "prompter"),
    "assistant": ("gpt", "chatgpt", "bot", "chatbot", "model", "bing", "bard"),
    "tool": ("observation", "function", "ipython", "tool_response"),
}


@pytest.mark.parametrize("role", ROLES)
def test_names_of_roles_are_mapped(role):
    for name in ROLES[role]:
        said = {"conversations": [{"from": name, "value": "x"}]}
        for record in (said, {"messages": [{"role": name}]}):
            (message,) = json.loads(conversation_text(record))["messages"]
            assert message["role"] == role, name


def test_a_system_text_beside_another_system_message_is_refused():
    messages = [{"role": "system", "content": "a"}, *talk("q", "b")]
    same, other = (conversation_text({"messages": messages, "system": text}) for text in "ac")
    assert json.loads(same)["messages"] == messages
    assert "are not the same" in json.loads(other)["refused"]


REFUSED = {
    "message 2 has the role 'assistent': write one of system": ANSWER | {"role": "assistent"},
    "message 2 ('assistant') has no content": ANSWER | {"content": None},
    "message 2 ('assistant') is empty": ANSWER | {"content": " "},
    "message 2 has a part of type 'image': only text": QUESTION | {"content": [{"type": "image"}]},
    "message 2 has a part of type 'text'": QUESTION | {"content": [{"type": "text"}]},
    "message 2 has a content of type 'dict'": QUESTION | {"content": {"a": 1}},
    "other kinds of values": QUESTION | {"tool_calls": 5},
    "message 2 calls a tool, but holds no JSON": {"from": "function_call", "value": "f(x)"},
    "a thought without an answer": ANSWER | {"channel": "analysis"},
}


@pytest.mark.parametrize("problem", REFUSED)
def test_a_message_that_cannot_be_read_is_refused(problem, folder):
    ours = conversations_of(folder, TEMPLATES["chatml"])
    with pytest.raises(ChatError, match=re.escape(problem)):
        said(folder, ours, {"messages": [QUESTION, REFUSED[problem]]})


def test_tools_and_variables_of_another_kind_are_refused(folder):
    ours, words = conversations_of(folder, TEMPLATES["qwen3"]), [["x"], "some words"]
    for key, values in (("tools", [*words, {"a": 1}]), ("chat_template_kwargs", words)):
        for value in values:
            with pytest.raises(ChatError, match=r"are no objects|other kinds of values"):
                said(folder, ours, {"messages": talk("q", "a"), key: value})


BOTH = ["assistant", "tool"]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("targets", "assistant,tool", BOTH),
        ("targets", '["assistant", "tool"]', BOTH),
        ("template_kwargs.enable_thinking", "false", {"enable_thinking": False}),
    ],
)
def test_keys_of_messages_are_read_from_a_command_line_and_a_file(key, text, value, tmp_path):
    job = load_job([f"--training.messages.{key}", text])
    assert getattr(job.training.messages, key.partition(".")[0]) == value
    save_job(job, tmp_path / "job.toml")
    assert load_job(["--job.config_file", str(tmp_path / "job.toml")]) == job


@pytest.mark.parametrize("value", ['"tool"', "[]", "[1]", "1"])
def test_targets_that_are_no_name_and_no_list_of_roles_are_refused(value, tmp_path):
    line = refusal(load_job, config_file(tmp_path, f"training.messages.targets = {value}"))
    assert line.startswith(f"training.messages.targets = {value} (")
    assert line.endswith("must be 'assistant', 'last', 'all' or a list of roles")


def test_variables_of_a_template_are_the_runs_or_the_records(folder):
    record = {"messages": talk("q", "a")}
    for edit, thought in ((without_marks, ""), (str, "<think>\n\n</think>\n\n")):
        silent = {"enable_thinking": False}
        ours = conversations_of(folder, edit(TEMPLATES["qwen3"]), template_kwargs=silent)
        assert said(folder, ours, record) == [f"{thought}a<|im_end|>"]
        with_thoughts = record | {"chat_template_kwargs": {"enable_thinking": True}}
        assert said(folder, ours, with_thoughts) == ["<think>\n\n</think>\n\na<|im_end|>"]


@pytest.mark.parametrize("place", ["files", "a list", "a text"])
def test_templates_are_found_where_models_have_them(place, tmp_path):
    """A template named tool_use writes conversations with tools."""
    plain, tools = TEMPLATES["chatml"], TEMPLATES["qwen3"]
    named = [{"name": "tool_use", "template": tools}, {"name": "default", "template": plain}]
    config = {"files": {}, "a list": {"chat_template": named}, "a text": {"chat_template": plain}}
    tokenizer_file(tmp_path, **config[place])
    if place == "files":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "chat_template.jinja").write_text(plain)
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(tools)
    ours = load_tokenizer(str(tmp_path), Training(dataset_format="messages")).conversations
    record = {"messages": talk("q", "a")}
    assert said(tmp_path, ours, record) == ["a<|im_end|>"]
    if place != "a text":
        with_tools = said(tmp_path, ours, record | {"tools": [{"name": "f"}]})
        assert with_tools == ["<think>\n\n</think>\n\na<|im_end|>"]
