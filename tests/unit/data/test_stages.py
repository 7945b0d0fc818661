"""A data position that goes on with another sequence length or another global batch, compared with
a slow loader in plain Python."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.documents import random_texts, write_jsonl
from titan_moe.config.job_config import Dataset, Training, Validation
from titan_moe.data.build import build_loader
from titan_moe.data.documents import is_held_out, mix
from titan_moe.data.file_corpus import FileCorpus
from titan_moe.data.packing import IGNORE_INDEX, Packer
from titan_moe.data.step_reader import Unread, continue_state, merge_states
from titan_moe.data.stream_order import StreamOrder
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.runtime.errors import RunError

# What follows is compared with the order of a run that holds documents out.
HELD_OUT = Validation(enable=True)
TOKENIZER = load_tokenizer("bytes")
SEED = 3


@dataclass(frozen=True)
class Stage:
    batch: int
    seq_len: int
    steps: int
    ranks: int = 1


PLANS = {
    "longer": [Stage(4, 32, 7), Stage(4, 96, 5, ranks=2)],
    "shorter": [Stage(4, 96, 5, ranks=2), Stage(4, 16, 9)],
    "more sequences": [Stage(4, 32, 7, ranks=2), Stage(8, 32, 4, ranks=4)],
    "fewer sequences": [Stage(8, 32, 6, ranks=4), Stage(2, 32, 9)],
    "both, and back": [Stage(4, 48, 6), Stage(6, 16, 5, ranks=3), Stage(4, 48, 4, ranks=2)],
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(StreamOrder, "CURSOR_EVERY", 8)
    return {
        "json": write_jsonl(tmp_path / "a.jsonl", random_texts(90, longest=60)),
        "c4": write_jsonl(tmp_path / "hub" / "b.json", random_texts(80, seed=1, longest=60)),
    }


def blend(files, *names):
    folder = files["c4"].rpartition("/")[0]
    parts = {
        "json": Dataset(dataset="json", dataset_path=files["json"], weight=1),
        "c4": Dataset(dataset="c4", dataset_path=folder, weight=2.5),
    }
    return [parts[name] for name in names]


def build(stage, parts):
    section = Training(
        blend=parts,
        repeat_dataset=True,
        seq_len=stage.seq_len,
        local_batch_size=stage.batch // stage.ranks,
    )
    return [
        build_loader(
            section,
            TOKENIZER,
            validation=HELD_OUT,
            seed=SEED,
            rank=rank,
            num_ranks=stage.ranks,
            global_batch_size=stage.batch,
        )
        for rank in range(stage.ranks)
    ]


def take(loaders, steps):
    """The global batches of some steps: (tokens, labels, documents, names) of every sequence."""
    found = []
    for _ in range(steps):
        batches = [batch for loader in loaders for batch in loader.next_step()]
        found.append(
            [
                (tokens.tolist(), labels.tolist(), documents.tolist(), names)
                for batch in batches
                for tokens, labels, documents, names in zip(
                    batch.tokens_BS,
                    batch.labels_BS,
                    batch.documents_BS,
                    batch.samples,
                    strict=True,
                )
            ]
        )
    return found


def position(loaders):
    """What a checkpoint holds of it."""
    return json.loads(json.dumps(merge_states([loader.state_dict() for loader in loaders])))


def staged_run(plan, parts):
    """All global batches, and what was left unread at each change."""
    batches, unread, loaders = [], [], []
    for stage in plan:
        before, loaders = loaders, build(stage, parts)
        if before:
            state = position(before)
            state, left = continue_state(state, before[0].identity, loaders[0].identity)
            unread.append(left)
            for loader in loaders:
                loader.load_state_dict(state)
        batches += take(loaders, stage.steps)
    return batches, unread


# --- the slow loader ------------------------------------------------------------------------------


@dataclass
class SlowStream:
    """One sequence of the global batch: all of its tokens in a list."""

    index: int
    batch: int
    first: list
    documents: list  # By part, (name, ids) by position; repeated.
    weights: list
    tokens: list = field(default_factory=list)  # (token, number of its document)
    names: list = field(default_factory=list)
    cursor: int = 0

    def __post_init__(self):
        self.opened = [[] for _ in self.first]
        self.taken = [0] * len(self.first)

    def take(self, seq_len):
        while len(self.tokens) < self.cursor + seq_len + 1:
            self.open_next()
        piece = self.tokens[self.cursor : self.cursor + seq_len + 1]
        self.cursor += seq_len
        inputs = piece[:-1]
        labels = [
            following[0] if following[1] == current[1] else IGNORE_INDEX
            for current, following in zip(inputs, piece[1:], strict=True)
        ]
        numbers = sorted({number for _, number in inputs})
        return (
            [token for token, _ in inputs],
            labels,
            [number - numbers[0] for _, number in inputs],
            [self.names[number] for number in numbers],
        )

    def open_next(self):
        part = min(
            range(len(self.first)),
            key=lambda p: (self.taken[p] / self.weights[p], mix(SEED, self.index, p)),
        )
        place = self.first[part] + self.index + len(self.opened[part]) * self.batch
        name, ids = self.documents[part](place)
        self.opened[part].append(place)
        self.taken[part] += len(ids)
        self.tokens += [(token, len(self.names)) for token in ids]
        self.names.append(name)


def slow_run(plan, documents, weights):
    batches, unread, streams = [], [], []
    first = [0] * len(weights)
    for stage in plan:
        if len(streams) != stage.batch:
            if streams:
                after, skipped = [], 0
                for part, begin in enumerate(first):
                    opened = {place for stream in streams for place in stream.opened[part]}
                    after.append(max(opened, default=begin - 1) + 1)
                    skipped += len(set(range(begin, after[-1])) - opened)
                tokens = sum(len(stream.tokens) - stream.cursor for stream in streams)
                unread.append(Unread(tokens, skipped))
                first = after
            streams = [
                SlowStream(index, stage.batch, first, documents, weights)
                for index in range(stage.batch)
            ]
        elif batches:
            unread.append(Unread(0, 0))
        batches += [[stream.take(stage.seq_len) for stream in streams] for _ in range(stage.steps)]
    return batches, unread


def slow_documents(files, name):
    """The documents of a part by position, without the production's orders of a stream."""
    lines = Path(files[name]).read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    if name == "c4":
        kept = [n for n in range(len(texts)) if not is_held_out(n)]
        order = [(f"c4/{n}", texts[n]) for n in kept]
        return lambda place: encoded(*order[place % len(order)])
    from titan_moe.data.document_order import CorpusOrder, Split

    corpus = FileCorpus("json", files[name], key="training.")
    order = CorpusOrder("json", corpus, split=Split.TRAIN, seed=SEED, repeat=True)
    return lambda place: encoded(*order.document(place)[:2])


def encoded(name, text):
    return name, [*text.encode(), TOKENIZER.eos_id]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("names", [("json",), ("c4",), ("json", "c4")])
def test_stages_read_what_a_slow_loader_reads(files, names, plan):
    parts = blend(files, *names)
    found = staged_run(PLANS[plan], parts)
    documents = [slow_documents(files, name) for name in names]
    expected = slow_run(PLANS[plan], documents, [part.weight for part in parts])
    assert found[1] == expected[1]
    assert found[0] == expected[0]
    if plan in ("longer", "shorter"):
        assert found[1] == [Unread(0, 0)]
    else:
        assert all(left.tokens > 0 for left in found[1])


def test_a_stage_goes_on_with_its_own_position(files):
    """A checkpoint inside a stage, or written by its first step before anything was read."""
    before, after = PLANS["more sequences"]
    parts = blend(files, "json", "c4")
    first, reference, resumed = build(before, parts), build(after, parts), build(after, parts)
    take(first, before.steps)
    moved, _ = continue_state(position(first), first[0].identity, reference[0].identity)
    for loader in reference:
        loader.load_state_dict(moved)
    for steps in (0, 3):
        take(reference, steps)
        state, left = continue_state(position(reference), first[0].identity, resumed[0].identity)
        assert left == Unread(0, 0)
        for loader in resumed:
            loader.load_state_dict(state)
        assert take(resumed, 2) == take(reference, 2)


def test_a_position_of_no_stage_is_refused(files):
    parts = blend(files, "json")
    first, other, ours = (build(Stage(4, seq_len, 1), parts)[0] for seq_len in (16, 32, 64))
    state = position([first])
    with pytest.raises(RunError, match="seq_len=16, this run has seq_len=32"):
        continue_state(state, other.identity, ours.identity)
    (more,) = build(Stage(8, 64, 1), blend(files, "c4"))
    with pytest.raises(RunError, match="fingerprint="):
        continue_state(state, more.identity, more.identity)


def test_a_position_that_lacks_a_rank_is_refused(files):
    first, _ = build(Stage(4, 32, 1, ranks=2), blend(files, "json"))
    (more,) = build(Stage(8, 32, 1), blend(files, "json"))
    with pytest.raises(RunError, match="holds 2 sequences, but not sequence 2 of global_batch_si"):
        continue_state(first.state_dict(), first.identity, more.identity)


def test_a_position_of_an_earlier_version_begins_at_the_first_document(files):
    stage, parts = Stage(4, 32, 3), blend(files, "json", "c4")
    first, second = build(stage, parts), build(stage, parts)
    take(first, 3)
    state = position(first)
    del state["first"]
    for row in state["rows"].values():
        del row["unread"]
    second[0].load_state_dict(state)
    assert take(second, 2) == take(first, 2)


def test_a_dropped_cursor_is_caught(files, monkeypatch):
    """A planted mistake: the rest of the open document is skipped where a stage begins."""
    resume = Packer.resume
    monkeypatch.setattr(Packer, "resume", lambda packer, *_: resume(packer, None, 0))
    found, _ = staged_run(PLANS["longer"], blend(files, "json"))
    expected, _ = slow_run(PLANS["longer"], [slow_documents(files, "json")], [1.0])
    steps = PLANS["longer"][0].steps
    assert found[:steps] == expected[:steps] and found[steps] != expected[steps]
