"""Texts cut into sequences, and conversations packed whole into them."""

import json
from collections import Counter
from dataclasses import replace
from functools import reduce
from operator import add

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from tests.support.conversations import SIZE, learned, read, talk, training, write
from tests.support.documents import slow_rows, with_batch
from tests.support.packing import filled, gradients
from titan_moe.data.batch import IGNORE_INDEX, BestFit, Encoded, Packer, whole_documents
from titan_moe.data.build import build_reader, measure_conversations
from titan_moe.data.loader import continue_state
from titan_moe.data.sequences import Identity
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.models.registry import model_config
from titan_moe.ops.attention import Sdpa
from titan_moe.runtime.errors import RunError


def draw(lengths):
    """Documents of random tokens, of which half are targets."""
    rng = np.random.default_rng(len(lengths))
    return [
        Encoded(str(n), rng.integers(0, 50, size), rng.random(size) < 0.5)
        for n, size in enumerate(lengths)
    ]


def rows_of(documents, seq_len):
    """The sequences that documents fill."""
    source = iter(documents)
    best_fit = BestFit(
        lambda: next(source, None), size=lambda each: len(each.ids), capacity=seq_len
    )
    return [whole_documents(group, seq_len) for group in iter(best_fit.next_group, [])]


def same(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.samples == other.samples
        for name in ("tokens_S", "labels_S", "documents_S"):
            assert np.array_equal(getattr(one, name), getattr(other, name))


def as_json(state):
    return json.loads(json.dumps(state))


def reader_of(section, size=SIZE):
    """The reader of a run on one rank."""
    return build_reader(with_batch(section, size), load_tokenizer("bytes", section), seed=3)


def lengths_of(section, part=0, parts=1):
    tokenizer = load_tokenizer("bytes", section)
    return measure_conversations(section, tokenizer, seed=3, part=part, parts=parts)[0]


@pytest.fixture(params=["json", "copy of a hub dataset"])
def section(request, tmp_path):
    records = [{"messages": talk("q" * (n % 17), "a" * (n % 31 + 1))} for n in range(450)]
    records[5::40] = [{"messages": talk("no answer", "")[:1]} for _ in records[5::40]]
    for number in range(2):
        folder = tmp_path / "data"
        folder.mkdir(exist_ok=True)
        write(folder / f"{number}.jsonl", records[number::2])
    dataset = "json" if request.param == "json" else "owner/name"
    return training(tmp_path / "data", dataset=dataset, repeat_dataset=True)


@settings(max_examples=200)
@given(st.lists(st.integers(2, 12), max_size=90), st.integers(12, 40))
def test_best_fit_keeps_each_document_whole_and_learns_every_target_once(lengths, seq_len):
    documents = draw(lengths)
    rows = rows_of(documents, seq_len)
    assert sorted(int(name) for row in rows for name in row.samples) == [*range(len(lengths))]
    for row in rows:
        end = 0
        for number, name in enumerate(row.samples):
            document = documents[int(name)]
            (at,) = np.nonzero(row.documents_S == number)
            assert at.tolist() == [*range(end, end := end + len(document.ids))]
            assert np.array_equal(row.tokens_S[at], document.ids)
            wanted = np.where(document.is_target, document.ids, IGNORE_INDEX)[1:]
            assert row.labels_S[at].tolist() == [*wanted, IGNORE_INDEX]
        assert (row.labels_S[end:] == IGNORE_INDEX).all()
        assert (row.documents_S[end:] == len(row.samples)).all()
        assert np.array_equal(row.tokens_S[end:], np.resize(row.tokens_S[:end], seq_len - end))


def test_best_fit_leaves_no_room_that_a_waiting_document_would_fill():
    assert [row.samples for row in rows_of(draw([5, 3, 2, 6, 4]), 10)] == [
        ["0", "4"],
        ["1", "3"],
        ["2"],
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_conversations_go_on_where_the_state_was_taken_on_any_number_of_ranks(section, ranks):
    whole, end = read(section, steps=7)
    first, state = read(section, steps=4, ranks=ranks)
    rest, resumed = read(section, steps=3, ranks=3 - ranks, state=as_json(state))
    same([*first, *rest], whole)
    assert as_json(resumed) == as_json(end)


def test_conversations_without_anything_to_learn_are_left_out_and_counted(tmp_path):
    nothing = {"messages": talk("why", "")[:1]}
    records = [{"messages": talk("a", "b")}, nothing, {"text": "x"}, {"messages": []}] * 20
    section = training(write(tmp_path / "a.jsonl", records), messages={"max_refused": 0.5})
    sequences, _ = read(section, steps=1)
    assert {*learned(sequences)} == {"b"}
    found = lengths_of(section)
    assert (found.tokens > 0).tolist() == [True, False, False, False] * 20
    assert [line.partition(": ")[2] for line in found.lines("x", 80, 0.5)] == [
        "40 of 80 conversations are refused: json/2: it is no conversation (40 so)",
        "20 of 80 conversations are left out: json/1: no message is to be learned in its first 128 "
        "tokens (20 so)",
    ]


def test_a_long_conversation_is_cut_or_dropped(tmp_path):
    records = [{"messages": talk("q", answer)} for answer in ("a" * 300, "b")] * 32
    path = write(tmp_path / "a.jsonl", records)
    cut, _ = read(training(path), steps=1)
    assert any("aaa" in text for text in learned(cut))
    assert lengths_of(training(path)).tokens[0] == 128
    (line,) = lengths_of(training(path)).lines("x", 64, 0)
    assert "32 of 64 conversations lose their ends, 6,208 tokens behind training.seq_len" in line
    drops = training(path, messages={"too_long": "drop"})
    dropped, _ = read(drops, steps=1)
    assert {*learned(dropped)} == {"b"}
    (line,) = lengths_of(drops).lines("x", 64, 0)
    assert "32 of 64 conversations are left out: " in line
    assert "tokens are more than training.seq_len=128" in line


def test_all_conversations_left_out_are_one_line(tmp_path):
    records = [{"messages": talk("q", "a" * 200)}] * 70
    section = training(write(tmp_path / "a.jsonl", records), messages={"too_long": "drop"})
    with pytest.raises(RunError, match=r"all 70 conversations are left out, such as json/\d+: its"):
        read(section, steps=1)
    # One that is not may come first in an epoch, and last in the next.
    write(tmp_path / "a.jsonl", [*records, {"messages": talk("q", "b")}])
    repeated = section.model_copy(update={"repeat_dataset": True})
    assert {*learned(read(repeated, steps=9)[0])} == {"b"}


@pytest.mark.parametrize("parts", [1, 3])
def test_lengths_of_all_parts_give_the_sequences_of_conversations_measured_in_turn(parts, section):
    found = [lengths_of(section, part, parts) for part in range(parts)]
    assert [*reduce(add, found).problems.values()] == [12]
    lengths = [sum(each.tokens for each in found)]
    same(read(section, lengths=lengths)[0], read(section)[0])


@pytest.mark.parametrize(("epochs", "ranks"), [(1, 1), (3, 2)])
def test_epochs_read_each_conversation_so_many_times(epochs, ranks, section):
    section = section.model_copy(update={"epochs": epochs})
    steps = reader_of(section).count_steps()
    sequences, state = read(section, steps=steps, ranks=ranks)
    counts = Counter(name for row in sequences for name in row.samples)
    assert len(counts) == 438 and {*counts.values()} == {epochs}
    # The last batch is filled up with sequences that teach nothing.
    left = [row for row in sequences if not row.samples]
    assert len(left) < SIZE and all((row.labels_S == IGNORE_INDEX).all() for row in left)
    with pytest.raises(RunError, match=f"step {steps + 1}: .*ran out: its 450 conversations"):
        read(section, state=state, steps=1)


@pytest.mark.parametrize(("before", "after", "taken"), [(1, 2, 1), (2, 3, 0.9), (3, 2, 0.4)])
def test_epochs_that_a_resume_changes_are_read_to_their_end(before, after, taken, section):
    """A batch of 32 sequences: at the end of the data some of it is not filled."""
    sections = [section.model_copy(update={"epochs": epochs}) for epochs in (before, after)]
    first, second = (reader_of(each, 32) for each in sections)
    begun, state = read(sections[0], steps=int(first.count_steps() * taken), size=32)
    second.load_state_dict(state)
    left = second.count_steps()
    assert second.state_dict() == state
    rest, _ = read(sections[1], state=state, steps=left, size=32)
    counts = Counter(name for row in [*begun, *rest] for name in row.samples)
    assert len(counts) == 438 and {*counts.values()} == {after}


def test_fewer_epochs_than_were_read_end_at_once(section):
    sections = [section.model_copy(update={"epochs": epochs}) for epochs in (3, 1)]
    long, short = (reader_of(each) for each in sections)
    short.load_state_dict(read(sections[0], steps=long.count_steps() - 2)[1])
    assert short.count_steps() == 0


def test_conversations_that_wait_are_read_after_a_change_of_the_batch(section):
    before, state = read(section, steps=2)
    saved = Identity(**state["identity"])
    moved = continue_state(state, saved, replace(saved, global_batch_size=6))
    after, _ = read(section, state=moved, steps=2, size=6)
    same([*before, *after], read(section, steps=5)[0])


def test_conversations_that_wait_and_are_too_long_for_a_stage_are_dropped(tmp_path):
    records = [{"messages": talk("q", "a" * (1 + n % 60))} for n in range(400)]
    path = write(tmp_path / "a.jsonl", records)
    sections = [training(path, seq_len=n, messages={"too_long": "drop"}) for n in (96, 48)]
    _, state = read(sections[0], steps=2)
    saved = Identity(**state["identity"])
    found, _ = read(
        sections[1], state=continue_state(state, saved, replace(saved, seq_len=48)), steps=2
    )
    assert len(found) == 2 * SIZE and all("a" * 40 not in text for text in learned(found))


def test_conversations_that_end_are_all_read_before_the_run_is_told(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"messages": talk("q", "a" * 40)}] * 8)
    found, _ = read(training(path), steps=1)
    assert sum(len(row.samples) for row in found) == 8
    with pytest.raises(RunError, match="ran out"):
        read(training(path), steps=2)


def test_packed_conversations_have_the_gradients_of_each_alone():
    """The loss is one sum over targets, whatever a sequence holds beside them; in float64."""
    documents = draw([7, 19, 4, 11, 13, 6])
    # A sequence's auxiliary loss depends on what else is in it.
    config = replace(model_config("qwen3", "gate"), init_std=0.3)
    assert config.moe is not None
    weights = {"sequence_aux_loss_weight": 0.0, "z_loss_weight": 0.01}
    config = replace(config, moe=replace(config.moe, **weights))
    packed, alone = (filled(config, Sdpa(mask_documents=True)) for _ in range(2))

    def losses(model, chosen, seq_len):
        for row in rows_of(chosen, seq_len):
            tokens, labels, number = (
                torch.from_numpy(x)[None] for x in (row.tokens_S, row.labels_S, row.documents_S)
            )
            logits = model(tokens, number, counted_BS=labels != IGNORE_INDEX)
            yield cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    total = sum(losses(packed, documents, 32))
    total.backward()
    each = sum(loss for document in documents for loss in losses(alone, [document], 19))
    each.backward()
    assert abs(total - each) <= 1e-12 * abs(each)
    ours, theirs = gradients(packed), gradients(alone)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 1e-11 * gradient.norm(), name


# --- texts ---

EOS = 99


def pack(documents, *, seq_len, mask):
    source = iter([Encoded(name, np.array(ids)) for name, ids in documents])
    packer = Packer(
        lambda: next(source, None), seq_len=seq_len, mask_documents=mask, padding_id=EOS
    )
    rows = []
    while (row := packer.next_sequence()) is not None:
        rows.append(row)
    return rows


def as_lists(row):
    return row.tokens_S.tolist(), row.labels_S.tolist(), row.documents_S.tolist(), row.samples


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(0, 12), max_size=12), seq_len=st.integers(1, 9), mask=st.booleans()
)
def test_rows_equal_the_slow_packer(lengths, seq_len, mask):
    token = iter(range(1000, 2000))
    documents = [
        (f"d{number}", [next(token) for _ in range(length)] + [EOS])
        for number, length in enumerate(lengths)
    ]
    expected = slow_rows(documents, seq_len=seq_len, mask=mask)
    rows = pack(documents, seq_len=seq_len, mask=mask)
    assert [as_lists(row) for row in rows[: len(expected)]] == expected
    assert len(rows) - len(expected) in (0, 1)  # The padded last row.
    # Each token but the first is a target once, or ignored as the first of a document.
    stream = [token for _, ids in documents for token in ids]
    first_tokens = sum(1 for _ in documents) - 1 if mask and documents else 0
    targets = sum(int((row.labels_S != IGNORE_INDEX).sum()) for row in rows)
    assert targets == max(0, len(stream) - 1 - first_tokens)


@pytest.mark.parametrize("lengths", [[], [0]])
def test_nothing_to_predict_is_no_row(lengths):
    assert pack([("a", [EOS]) for _ in lengths], seq_len=4, mask=True) == []
