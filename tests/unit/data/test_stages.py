"""A data position goes on with another sequence length or another global batch."""

from dataclasses import dataclass

import pytest

from tests.support.documents import loaders_of, position, random_texts, take, write_hub, write_jsonl
from titan_moe.config.job_config import Dataset, Training
from titan_moe.data.corpus import FileCorpus, Source
from titan_moe.data.loader import continue_state
from titan_moe.data.order import CorpusOrder, Split
from titan_moe.data.stream import StreamOrder

SEED = 3


@dataclass(frozen=True)
class Stage:
    batch: int
    seq_len: int
    steps: int
    ranks: int = 1


@pytest.fixture
def sources(tmp_path, monkeypatch):
    monkeypatch.setattr(StreamOrder, "CURSOR_EVERY", 8)
    path = write_jsonl(tmp_path / "a.jsonl", random_texts(90, longest=60))
    write_jsonl(tmp_path / "hub" / "b.json", random_texts(80, seed=1, longest=60))
    return {
        "json": Dataset(dataset="json", dataset_path=path, weight=1),
        "c4": Dataset(dataset="c4", dataset_path=str(tmp_path / "hub"), weight=2.5),
    }


def build(stage, parts):
    section = Training(
        blend=parts,
        repeat_dataset=True,
        seq_len=stage.seq_len,
        local_batch_size=stage.batch // stage.ranks,
    )
    return loaders_of(section, stage.ranks, seed=SEED, rows=stage.batch)


def staged_run(plan, parts):
    """Returns the global batches of all stages."""
    batches, loaders = [], []
    for stage in plan:
        before, loaders = loaders, build(stage, parts)
        if before:
            state = continue_state(position(before), before[0].identity, loaders[0].identity)
            for loader in loaders:
                loader.load_state_dict(state)
        batches += take(loaders, stage.steps)
    return batches


def sequences(batches):
    """Tokens and labels of each sequence of the global batch, over all steps."""
    return [
        ([x for row in rows for x in row[0]], [x for row in rows for x in row[1]])
        for rows in zip(*batches, strict=True)
    ]


@pytest.mark.parametrize("names", [("json",), ("c4",), ("json", "c4")])
@pytest.mark.parametrize("lengths", [(32, 96), (96, 16)])
def test_sequences_go_on_under_another_length(sources, names, lengths):
    parts = [sources[name] for name in names]
    staged = staged_run([Stage(4, length, 6, ranks=2) for length in lengths], parts)
    plain = staged_run([Stage(4, 16, 6 * sum(lengths) // 16)], parts)
    assert sequences(staged) == sequences(plain)


@pytest.mark.parametrize("batches", [(4, 8), (8, 2), (6, 4)])
def test_another_batch_begins_behind_all_documents_before(sources, batches):
    before, after = batches
    plan = [Stage(before, 32, 7, ranks=2), Stage(after, 48, 1)]
    *first, last = staged_run(plan, [sources["json"]])
    corpus = FileCorpus(Source("training.", "json", sources["json"].dataset_path))
    order = CorpusOrder("json", corpus, split=Split(64), seed=SEED, epochs=1)
    places = {order.document(place).name: place for place in range(order.size)}
    seen = max(places[name] for step in first for *_, names in step for name in names)
    begin = places[last[0][3][0]]
    # A sequence may have opened a document whose first token is the last label of its row.
    assert seen < begin <= seen + before
    assert [places[names[0]] for *_, names in last] == list(range(begin, begin + after))


@pytest.mark.parametrize("batches", [(8, 4, 8), (8, 6, 2), (2, 8, 4)])
def test_stages_over_several_files_read_nothing_twice_on_any_ranks(tmp_path, batches):
    texts = [f"<{number}>" * 12 for number in range(600)]
    parts = [Dataset(dataset="c4", dataset_path=write_hub(tmp_path / "hub", texts, num_files=12))]
    found = staged_run([Stage(batch, 64, 6) for batch in batches], parts)
    assert found == staged_run([Stage(batch, 64, 6, ranks=batch) for batch in batches], parts)
    stages = [
        {name for step in found[first : first + 6] for *_, names in step for name in names}
        for first in (0, 6, 12)
    ]
    assert len(set.union(*stages)) == sum(map(len, stages))


def test_stage_resumes_at_its_position(sources):
    """A checkpoint inside a stage, or written by its first step before anything was read."""
    before, after = Stage(4, 32, 7, ranks=2), Stage(8, 32, 4, ranks=4)
    parts = [*sources.values()]
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
