import json

import datasets
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from tests.support.chat_templates import tokenizer_file
from tests.support.conversations import SIZE, as_parquet, learned, read, talk, training, write
from tests.support.documents import with_batch, write_ranks
from tests.support.refusals import refusal
from titan_moe.config.job_config import Training, Validation
from titan_moe.data.batch import IGNORE_INDEX
from titan_moe.data.build import build_reader, build_validation, measure_conversations
from titan_moe.data.builtin import StdlibConversations
from titan_moe.data.check import sample_data
from titan_moe.data.conversations import conversation_text, without_nulls
from titan_moe.data.corpus import FileCorpus, Source
from titan_moe.data.stream import HubStream
from titan_moe.data.tokenizer import load_tokenizer


def source(path, dataset):
    """Returns a source of conversations."""
    return Source("training.", dataset, str(path), None)


RECORDS = {
    "messages": {"messages": talk("Why?", "So.")},
    "messages as JSON": {"messages": json.dumps(talk("Why?", "So."))},
    "conversations": {
        "conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]
    },
    "prompt and completion": {"prompt": talk("Why?", "So.")[:1], "completion": talk("", "So.")[1:]},
}


@pytest.mark.parametrize("dataset", ["json", "parquet", "copy of a hub dataset"])
@pytest.mark.parametrize("form", RECORDS)
def test_every_form_of_a_conversation_is_learned_alike(form, dataset, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"id": 3, **RECORDS[form]}] * SIZE)
    if dataset == "parquet":
        path = as_parquet(path)
    keys = {"dataset": "owner/name"} if "hub" in dataset else {"dataset": dataset}
    sequences, _ = read(training(path, **keys, repeat_dataset=True), steps=1)
    assert {*learned(sequences)} == {"So."}  # And the token that ends a turn, which is no text.
    ids = sequences[0].labels_S[sequences[0].labels_S != IGNORE_INDEX]
    assert ids[:4].tolist() == [*b"So.", 257]
    asked = bytes(sequences[0].tokens_S[:20].clip(max=255).astype(np.uint8))
    assert b"user\nWhy?" in asked


def test_texts_of_prompt_and_completion_need_no_template(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "2 + 2 =", "completion": " 4"}] * SIZE)
    (sequence, *_), _ = read(training(path), steps=1)
    assert sequence.tokens_S[:10].tolist() == [*b"2 + 2 = 4", 257]
    ignored = [IGNORE_INDEX] * 6
    assert sequence.labels_S[:11].tolist() == [*ignored, *b" 4", 257, IGNORE_INDEX, IGNORE_INDEX]


@pytest.mark.parametrize(("targets", "wanted"), [("assistant", {"b", "d"}), ("last", {"d"})])
def test_targets_are_all_answers_or_the_last(targets, wanted, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"messages": talk("a", "b") + talk("c", "d")}] * SIZE)
    sequences, _ = read(training(path, messages={"targets": targets}), steps=1)
    assert {*"".join(learned(sequences))} == wanted


def test_a_null_of_arrow_is_no_argument_of_a_call():
    call = {"role": "assistant", "tool_calls": [{"name": "f", "x": None, "y": [None, {"z": None}]}]}
    found = without_nulls(call, None, json.loads)
    assert found["tool_calls"] == [{"name": "f", "y": [None, {}]}]


def asked(**arguments):
    """Returns the messages of a call with these arguments, whose own content is null."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [*talk("a", "b"), {"role": "user", "content": "c"}, said]


@pytest.mark.parametrize("form", ["JSON", "Parquet of pyarrow", "Parquet of datasets", "saved"])
def test_a_set_whose_calls_differ_in_their_keys_is_one_in_every_form(form, tmp_path):
    """`datasets` 5 writes messages whose keys vary as JSON, and a set that pyarrow wrote holds no
    nulls of its own."""
    records = [{"messages": asked(x=1, y=None), "tools": []}, {"messages": asked(x="a", z=[2])}] * 2
    path, dataset = write(tmp_path / "a.jsonl", records), "json"
    wanted = [json.loads(each.content) for each in FileCorpus(source(path, dataset))]
    whole = datasets.load_dataset("json", data_files=str(path), split="train")
    if form == "JSON":
        path = tmp_path / "a.json"
        path.write_text(json.dumps(records, indent=1))
    elif form == "saved":
        path, dataset = tmp_path / "saved", "owner/name"
        whole.save_to_disk(path)
    else:
        path, dataset = tmp_path / "a.parquet", "parquet"
        if form == "Parquet of datasets":
            whole.to_parquet(path)
            assert "arrow.json" in str(parquet.read_schema(path))
        else:
            table = [{"messages": asked(x=1, y=None)}, {"messages": asked(x=1, z=[2])}] * 2
            without = [without_nulls(each, None, json.loads) for each in table]
            wanted = [json.loads(conversation_text(each)) for each in without]
            parquet.write_table(pyarrow.Table.from_pylist(table), path)
    if form == "saved":
        found = [*HubStream(source(path, dataset)).read()]
    else:
        found = [*FileCorpus(source(path, dataset))]
    assert [json.loads(each.content) for each in found] == wanted


def checked(section):
    """Returns the lines of a check."""
    section = section.model_copy(update={"global_batch_size": SIZE})
    return sample_data(section, Validation(), load_tokenizer("bytes", section), seed=3)


CASES = [("cut", None, 9), ("drop", 1, 2), ("cut", 3, 28)]


@pytest.mark.parametrize(("too_long", "epochs", "steps"), CASES)
def test_check_says_how_many_steps_epochs_have(too_long, epochs, steps, tmp_path):
    """The line also names the special tokens inside of conversations."""
    records = [{"messages": talk("q", "a" * size)} for size in (20, 500) * 28]
    records[-1]["messages"][0]["content"] = "<|eos|>"
    keys = {"messages": {"too_long": too_long}, "epochs": epochs}
    line, *_ = checked(training(write(tmp_path / "a.jsonl", records), **keys))
    tokens = 28 * ((42 + 128) if too_long == "cut" else 42)
    steps = f"{'3 epochs' if epochs == 3 else 'an epoch'} about {steps} steps"
    assert f"56 documents, about {tokens:,} tokens, {steps}; 1 of 56" in line
    assert line.endswith("1 of 56 conversations name special tokens, as '<|eos|>' in json/55")


def test_check_names_a_role_to_learn_that_it_has_not_seen(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"messages": talk("q", "a")}] * 5)
    line, *_ = checked(training(path, messages={"targets": ["assistant", "tol"]}))
    assert line.endswith("; of 5 conversations none has the role 'tol'")


def test_check_shows_the_first_conversation_and_what_is_learned_of_it(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"messages": talk("Why?", "So " + "a" * 60)}] * 5)
    assert checked(training(path))[1:] == [
        "of 5 conversations the chat template leaves out nothing",
        "json/0, what is learned between ⟪ and ⟫:\n<|bos|>user\nWhy?<|eos|>\n<|bos|>assistant\n"
        "⟪So " + "a" * 60 + "<|eos|>⟫\n",
    ]
    _, cut, *_ = checked(training(path, seq_len=64))
    assert "5 of 5 conversations lose their ends, 120 tokens behind training.seq_len" in cut
    question, answer = talk("Why?", "So")
    thinking = [question, answer | {"reasoning_content": "h"}]
    write(tmp_path / "a.jsonl", [{"messages": thinking}] * 5)
    allowed = training(path, messages={"may_leave_out": ["thoughts"]})
    assert "of 5 conversations the chat template leaves out 5 thoughts" in checked(allowed)


@pytest.mark.parametrize(("share", "most"), [(0.01, 1), (0.02, 2), (1, 100)])
def test_more_refused_conversations_than_a_key_allows_stop_a_run(share, most, tmp_path):
    section = training(tmp_path / "a.jsonl")
    for count in (most, most + 1):
        records = [{"messages": talk("q", "a")} for _ in range(100)]
        for record in records[:count]:
            record["messages"][0]["role"] = "usr"
        (found,) = measure_conversations(
            training(write(tmp_path / "a.jsonl", records), messages={"max_refused": 1}),
            load_tokenizer("bytes", section),
            **{"seed": 3, "part": 0, "parts": 1},
        )
        said = "x: {} of 100 conversations are refused: json/0: message 1 has the role 'usr'"
        if count <= most:
            assert said.format(count) in found.lines("x", 100, share)[0]
        elif count <= 100:
            line = refusal(found.lines, "x", 100, share)
            assert said.format(count) in line
            assert f"more than training.messages.max_refused={share:g} of them" in line


def test_a_refused_conversation_among_the_first_stops_check_and_run(tmp_path):
    records = [{"messages": talk("q", "a")} for _ in range(300)]
    records[5]["messages"][1]["role"] = "assistent"
    section = training(write(tmp_path / "a.jsonl", records))
    for doing in (checked, read):
        line = refusal(doing, section)
        said = "json/5: message 2 has the role 'assistent': write one of system, developer"
        assert f"1 of 64 conversations are refused: {said}" in line


def test_a_folder_as_the_name_of_a_dataset_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner/name").mkdir(parents=True)
    line = refusal(read, Training(dataset="owner/name"))
    assert (
        line == "training.dataset='owner/name' is a folder here: name it in training.dataset_path"
    )


def test_held_out_conversations_are_measured_and_not_trained_on(tmp_path):
    records = [{"messages": talk(str(n), f"answer {n}")} for n in range(300)]
    section = training(write(tmp_path / "a.jsonl", records))
    validation = Validation(enable=True, local_batch_size=2)
    tokenizer = load_tokenizer("bytes", section)
    place = {"seed": 0, "rank": 0, "num_ranks": 1}
    loader = build_validation(validation, section, tokenizer, **place)
    held_out = {name for batch in loader for row in batch.samples for name in row}
    reader = build_reader(with_batch(section, 4), tokenizer, validation=validation, **place)
    trained = {name for rows in reader.read_step() for row in rows for name in row.samples}
    assert len(held_out) == 4 and not held_out & trained


MISTAKES = {
    "no roles": ([{"text": "a"}], {}, "training.dataset_format='messages': no record looked at"),
    "no answer": (
        [{"messages": talk("a", "b")[:1]}],
        {},
        "no message of its first 64 conversations is to be learned",
    ),
    "no such template": (
        [{"messages": talk("a", "b")}],
        {"messages": {"template": "missing.jinja"}},
        "training.messages.template: 'missing.jinja' cannot be read: No such file",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_before_anything_starts(name, tmp_path, monkeypatch):
    records, keys, line = MISTAKES[name]
    monkeypatch.chdir(tmp_path)
    section = training(write(tmp_path / "a.jsonl", records * 4), **keys)
    assert line in refusal(read, section)


def test_a_parquet_file_without_conversations_says_what_one_has(tmp_path):
    path = as_parquet(write(tmp_path / "a.jsonl", [{"text": "a"}] * SIZE))
    line = refusal(read, training(path, dataset="parquet"))
    assert "holds `messages` with role and content" in line and "text_column" not in line


def test_a_tokenizer_without_a_template_says_how_to_name_one(tmp_path):
    tokenizer_file(tmp_path)
    line = refusal(load_tokenizer, str(tmp_path), Training(dataset_format="messages"))
    assert "has no chat_template: name one with training.messages" in line
    named = Training(dataset_format="messages", messages={"template": "chatml"})
    assert load_tokenizer(str(tmp_path), named).conversations is not None


@pytest.mark.parametrize("kind", ["bytes", "tokenizer.json", "tiktoken"])
def test_each_id_stands_for_the_characters_that_it_is_said_to_stand_for(kind, tmp_path):
    path, keys = "bytes", {}
    if kind == "tokenizer.json":
        tokenizer_file(tmp_path)
        path, keys = str(tmp_path), {"template": "chatml"}
    elif kind == "tiktoken":
        path = write_ranks(tmp_path / "tokenizer.model")
        (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    tokenizer = load_tokenizer(path, Training(dataset_format="messages", messages=keys))
    text = {"bytes": "<|bos|>", "tokenizer.json": "<|im_start|>", "tiktoken": "<|eot_id|>"}[kind]
    text += "naïve 水🙂 <b> x=1;\n\n   end"
    ids, begins, ends = tokenizer._encoding.encode_spans(text)
    assert tokenizer.decode(ids) == (text if kind != "bytes" else text[7:])
    contents, is_special = tokenizer.pieces(ids)
    assert b"".join(contents).decode() == text
    assert is_special == [True, *[False] * (len(ids) - 1)]
    # A character of several ids belongs to all of them.
    covered = {place for b, e in zip(begins, ends, strict=True) for place in range(b, e)}
    assert covered == {*range(len(text))}
    assert begins[0] == 0 and ends[0] == text.index("n") and (np.diff(begins) >= 0).all()
    for number, begin, end in zip(ids, begins, ends, strict=True):
        said = tokenizer.decode([number])
        if said.isascii() and "<|" not in text[begin:end]:
            assert said == text[begin:end]


def test_questions_about_the_library_are_answered_by_first_lines_of_docstrings(tmp_path):
    code = ['def f():\n    """Adds."""', 'class C:\n    """\n    Counts.\n\n    More."""']
    (tmp_path / "a.py").write_text("\n\n".join([*code, "def g(): pass"]))
    corpus = StdlibConversations(tmp_path)
    talks = [json.loads(corpus[n].content)["messages"] for n in range(len(corpus))]
    assert talks == [talk("What is f of a?", "Adds."), talk("What is C of a?", "Counts.")]
    assert [corpus[n].name for n in range(2)] == ["stdlib/a.py:1", "stdlib/a.py:4"]
