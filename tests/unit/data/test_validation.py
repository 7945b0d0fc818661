import itertools

import pytest
import torch

from tests.support.documents import TOKENIZER, build_loader, random_texts, slow_rows, write_jsonl
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Dataset, Training, Validation
from titan_moe.data.batch import IGNORE_INDEX
from titan_moe.data.build import build_validation
from titan_moe.data.check import sample_data
from titan_moe.runtime.errors import RunError


def build(training, num_ranks=1, **keys):
    validation = Validation(**({"enable": True, "local_batch_size": 2} | keys))
    place = {"seed": 0, "num_ranks": num_ranks}
    ranks = range(num_ranks)
    return [build_validation(validation, training, TOKENIZER, rank=r, **place) for r in ranks]


def rows_in_order(ranks):
    """(tokens, labels, documents) of all rows in their global order, without the ignored ones."""
    rows = []
    for step in zip(*ranks, strict=True):  # Raises when the ranks' numbers of batches differ.
        for batch in step:
            parts = (batch.tokens_BS, batch.labels_BS, batch.documents_BS)
            rows += [tuple(row) for row in zip(*(part.tolist() for part in parts), strict=True)]
    return [row for row in rows if any(label != IGNORE_INDEX for label in row[1])]


@pytest.fixture
def training(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", random_texts(640))
    return Training(dataset="json", dataset_path=path, seq_len=64, local_batch_size=2)


def test_every_number_of_ranks_validates_the_same_rows(training):
    (one,) = build(training)
    first = rows_in_order([one])
    assert len(first) >= 10
    assert rows_in_order([one]) == first
    for num_ranks in (2, 3, 4):
        assert rows_in_order(build(training, num_ranks)) == first
    assert rows_in_order(build(training, 2, local_batch_size=5)) == first


@pytest.mark.parametrize("mask", [True, False])
def test_rows_are_those_of_a_plain_packing(tmp_path, mask):
    texts = random_texts(150)
    path = write_jsonl(tmp_path / "v.jsonl", texts)
    ids = [[*text.encode(), TOKENIZER.eos_id] for text in texts]
    documents = [(f"json/{number}", each) for number, each in enumerate(ids)]
    rows = slow_rows(documents, seq_len=64, mask=mask)
    section = Training(seq_len=64, local_batch_size=2, mask_documents=mask)
    found = rows_in_order(build(section, dataset="json", dataset_path=path))
    assert found[: len(rows)] == [tuple(row[:3]) for row in rows]
    assert len(found) == len(rows) + 1  # The rest is padded.


def test_steps_limit_the_rows_of_all_ranks_together(training):
    everything = rows_in_order(build(training))
    for num_ranks, batches in ((1, 4), (2, 2), (3, 2), (4, 1)):
        ranks = build(training, num_ranks, steps=4)
        assert [len(list(rank)) for rank in ranks] == [batches] * num_ranks
        assert rows_in_order(ranks) == everything[: 4 * 2]
    batches = [len(list(rank)) for rank in build(training, 2, steps=1000)]
    assert batches == [-(-len(everything) // 4)] * 2


@pytest.mark.parametrize("every", [64, 5])
def test_held_out_documents_are_whole_and_never_trained_on(training, every):
    (loader,) = build(training, held_out_every=every)
    validated = {name for batch in loader for row in batch.samples for name in row}
    assert len(validated) == 640 // every
    section, count = training.model_copy(update={"repeat_dataset": True}), 640 - len(validated)
    validation = Validation(enable=True, held_out_every=every)
    trained = trained_documents(section, validation, count)
    assert len(trained) == count and not trained & validated
    targets = sum(int((batch.labels_BS != IGNORE_INDEX).sum()) for batch in loader)
    corpus = random_texts(640)
    lengths = [len(corpus[int(name.removeprefix("json/"))].encode()) for name in validated]
    assert targets == sum(lengths)  # Each document predicts its tokens but the first, and EOS.


def trained_documents(training, validation, number):
    """The names of so many different documents that a run trains on."""
    loader = build_loader(training, validation=validation)
    names = set()
    for _ in range(2000):
        names |= {name for batch in loader.next_step() for row in batch.samples for name in row}
        if len(names) >= number:
            break
    loader.close()
    return names


@pytest.mark.parametrize("own_data", [False, True])
def test_without_held_out_documents_all_are_trained_on(training, tmp_path, own_data):
    section = training.model_copy(update={"repeat_dataset": True})
    path = write_jsonl(tmp_path / "v.jsonl", ["x" * 30] * 5)
    own = {"dataset": "json", "dataset_path": path}
    validation = Validation(enable=own_data, **(own if own_data else {}))
    assert len(trained_documents(section, validation, 640)) == 640


def test_position_of_a_run_that_held_documents_out_is_refused_without_validation(training):
    with_validation = Validation(enable=True)
    state = build_loader(training, validation=with_validation).state_dict()
    build_loader(training, validation=with_validation).load_state_dict(state)
    assert "held_out" not in str(state["identity"])  # Positions of before the key was there.
    with pytest.raises(RunError, match="taken with fingerprint="):
        build_loader(training).load_state_dict(state)
    with pytest.raises(RunError, match=r"this run has fingerprint=.*:validation.held_out_every=5"):
        others = Validation(enable=True, held_out_every=5)
        build_loader(training, validation=others).load_state_dict(state)


@pytest.mark.parametrize(("every", "count"), [(64, 7), (63, 8)])
def test_few_held_out_documents_are_noted(tmp_path, every, count):
    path = write_jsonl(tmp_path / "a.jsonl", random_texts(511))
    training = Training(dataset="json", dataset_path=path, global_batch_size=8)
    validation = Validation(enable=True, held_out_every=every)
    lines = sample_data(training, validation, TOKENIZER, seed=0)
    assert f"for validation: {count} documents" in lines[1]
    line = "validation.held_out_every=64 holds out 7 of 511 documents of training.dataset='json', "
    remedy = "a noisy loss: choose a smaller one, or name a validation.dataset"
    assert lines[2:] == [line + remedy] * (count < 8)


def test_training_data_named_again_means_its_held_out_part(training, tmp_path):
    for path in (training.dataset_path, f"{tmp_path}/./a.jsonl"):
        again = build(training, dataset=training.dataset, dataset_path=path)
        assert rows_in_order(again) == rows_in_order(build(training))


def test_every_source_of_a_blend_is_validated(tmp_path):
    small = write_jsonl(tmp_path / "s.jsonl", ["s" * 40] * 64)
    large = write_jsonl(tmp_path / "l.jsonl", ["l" * 40] * 640)
    training = Training(
        seq_len=32,
        blend=[
            Dataset(dataset="json", dataset_path=small, weight=1),
            Dataset(dataset="json", dataset_path=large, weight=1),
        ],
    )
    tokens = [token for row in rows_in_order(build(training)) for token in row[0]]
    assert (tokens.count(ord("s")), tokens.count(ord("l"))) == (40, 400)


def test_validation_of_a_stream_needs_steps(tmp_path):
    write_jsonl(tmp_path / "hub" / "a.json", random_texts(1000))
    training = Training(dataset="c4", dataset_path=str(tmp_path / "hub"), seq_len=64)
    with pytest.raises(ConfigError, match=r"validation.steps=-1 would read all of the stream 'c4'"):
        build(training)
    first = rows_in_order(build(training, steps=2))
    assert len(first) == 4 and rows_in_order(build(training, 2, steps=2)) == first


def test_too_few_documents_to_hold_one_out(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["only"])
    with pytest.raises(ConfigError, match=r"training.dataset='json' has too few documents"):
        build(Training(dataset="json", dataset_path=path))


def test_ignored_rows_fill_the_last_batch(training):
    ranks = build(training, 4, local_batch_size=3)
    last = [list(rank)[-1] for rank in ranks]
    labels = torch.cat([batch.labels_BS for batch in last])
    empty = (labels == IGNORE_INDEX).all(dim=1).tolist()
    assert empty == sorted(empty) and any(empty)  # At the end, not between.
    samples = list(itertools.chain(*(batch.samples for batch in last)))
    assert [not names for names in samples] == empty
    # Padding alone would go to the same few experts, beyond what a bounded buffer holds.
    tokens = torch.cat([batch.tokens_BS for batch in last])
    first = next(iter(ranks[0])).tokens_BS[0]
    assert all(torch.equal(row, first) for row in tokens[torch.tensor(empty)])
