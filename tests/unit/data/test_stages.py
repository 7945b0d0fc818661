"""A data position that goes on with another sequence length or another global batch, compared with
a slow loader in plain Python."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.documents import is_held_out, random_texts, write_hub, write_jsonl
from titan_moe.config.job_config import Dataset, Training, Validation
from titan_moe.data.build import build_loader
from titan_moe.data.corpus import FileCorpus, Source
from titan_moe.data.order import CorpusOrder, Split, mix
from titan_moe.data.packing import IGNORE_INDEX
from titan_moe.data.reader import continue_state, merge_states
from titan_moe.data.stream import StreamOrder
from titan_moe.data.tokenizer import load_tokenizer

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
    """All global batches."""
    batches, loaders = [], []
    for stage in plan:
        before, loaders = loaders, build(stage, parts)
        if before:
            state = continue_state(position(before), before[0].identity, loaders[0].identity)
            for loader in loaders:
                loader.load_state_dict(state)
        batches += take(loaders, stage.steps)
    return batches


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
    batches, streams = [], []
    first = [0] * len(weights)
    for stage in plan:
        if len(streams) != stage.batch:
            first = [
                max((p for stream in streams for p in stream.opened[part]), default=begin - 1) + 1
                for part, begin in enumerate(first)
            ]
            streams = [
                SlowStream(index, stage.batch, first, documents, weights)
                for index in range(stage.batch)
            ]
        batches += [[stream.take(stage.seq_len) for stream in streams] for _ in range(stage.steps)]
    return batches


def slow_documents(files, name):
    """The documents of a part by position, without the production's orders of a stream."""
    lines = Path(files[name]).read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    if name == "c4":
        kept = [text for text in texts if not is_held_out(text)]
        return lambda place: encoded(f"c4/0/{place}", kept[place % len(kept)])
    corpus = FileCorpus(Source("training.", "json", files[name]))
    order = CorpusOrder("json", corpus, split=Split.TRAIN, seed=SEED, repeat=True)
    return lambda place: encoded(*order.document(place))


def encoded(name, text):
    return name, [*text.encode(), TOKENIZER.eos_id]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("names", [("json",), ("c4",), ("json", "c4")])
def test_stages_read_what_a_slow_loader_reads(files, names, plan):
    parts = blend(files, *names)
    documents = [slow_documents(files, name) for name in names]
    expected = slow_run(PLANS[plan], documents, [part.weight for part in parts])
    assert staged_run(PLANS[plan], parts) == expected


@pytest.mark.parametrize("batches", [(8, 4, 8), (8, 6, 2), (2, 8, 4)])
def test_stages_over_several_files_read_the_same_on_other_ranks_and_nothing_twice(
    tmp_path, batches
):
    texts = [f"<{number}>" * 12 for number in range(600)]
    parts = [Dataset(dataset="c4", dataset_path=write_hub(tmp_path / "hub", texts, num_files=12))]
    plan = [Stage(batch, 64, 6) for batch in batches]
    found = staged_run(plan, parts)
    assert found == staged_run([Stage(batch, 64, 6, ranks=batch) for batch in batches], parts)
    stages = [
        {name for step in found[first : first + 6] for *_, names in step for name in names}
        for first in (0, 6, 12)
    ]
    assert len(set.union(*stages)) == sum(map(len, stages))


def test_stage_resumes_at_its_position(files):
    """A checkpoint inside a stage, or written by its first step before anything was read."""
    before, after = PLANS["more sequences"]
    parts = blend(files, "json", "c4")
    first, reference, resumed = build(before, parts), build(after, parts), build(after, parts)
    take(first, before.steps)
    moved = continue_state(position(first), first[0].identity, reference[0].identity)
    for loader in reference:
        loader.load_state_dict(moved)
    for steps in (0, 3):
        take(reference, steps)
        state = continue_state(position(reference), first[0].identity, resumed[0].identity)
        for loader in resumed:
            loader.load_state_dict(state)
        assert take(resumed, 2) == take(reference, 2)
