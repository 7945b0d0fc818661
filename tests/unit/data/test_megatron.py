"""Pairs of Megatron-LM's files are read as their documents, and refused in one line if damaged."""

import os
import struct

import pytest

from tests.support.documents import (
    TOKENIZER,
    build_loader,
    random_texts,
    training,
    write_jsonl,
    write_megatron,
)
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Training, Validation
from titan_moe.data.check import sample_data
from titan_moe.data.corpus import Source
from titan_moe.data.megatron import MegatronCorpus
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.runtime.errors import RunError

DOCUMENTS = [[[1, 2, 3], [4]], [], [[]], [[5, 6]], [[], [7, 127, 0]]]
WHOLE = [[1, 2, 3, 4], [], [], [5, 6], [7, 127, 0]]


def opened(path):
    return MegatronCorpus(Source("training.", "megatron", str(path)))


def contents(corpus):
    return [corpus[index].content.tolist() for index in range(len(corpus))]


@pytest.mark.parametrize("modes", [False, True])
@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 8])
def test_documents_of_a_pair_are_those_of_its_index(tmp_path, code, modes):
    prefix = tmp_path / "my.text_document"
    write_megatron(prefix, DOCUMENTS, code=code, modes=modes)
    for path in (tmp_path, prefix, f"{prefix}.idx", f"{prefix}.bin"):
        assert contents(opened(path)) == WHOLE
    assert opened(prefix)[3].name == "my.text_document/3"


def test_pairs_of_a_folder_follow_one_another_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr("titan_moe.data.megatron._MOST_OPEN", 2)
    write_megatron(tmp_path / "b", [[[2]], [[3]]], code=4)
    write_megatron(tmp_path / "a" / "c", [[[1]]])
    write_megatron(tmp_path / "c", [])
    write_megatron(tmp_path / "d", [[[4]]], code=1)
    corpus = opened(tmp_path)
    assert contents(corpus) == [[1], [2], [3], [4]]
    before, checksum = corpus.fingerprint, corpus.checksum()
    write_megatron(tmp_path / "d", [[[5]]], code=1)
    assert opened(tmp_path).checksum() != checksum and opened(tmp_path).fingerprint == before
    write_megatron(tmp_path / "d", [[[5]], []], code=1)
    assert opened(tmp_path).fingerprint != before


def test_training_on_a_pair_is_training_on_its_texts(tmp_path):
    """Documents that have the tokens around them already get no second ones."""
    around = load_tokenizer("bytes", Training(prepend_bos=True))
    texts = random_texts(60)
    ids = [TOKENIZER.encode(text).tolist() for text in texts]
    write_megatron(tmp_path / "plain", [[document] for document in ids])
    bos, eos = [around.bos_id], [around.eos_id]
    write_megatron(tmp_path / "ended", [[document, eos] for document in ids])
    write_megatron(tmp_path / "around", [[bos, document, eos] for document in ids])
    write_jsonl(tmp_path / "json", texts)
    found = []
    for name in ("json", "plain", "ended", "around"):
        kind = "json" if name == "json" else "megatron"
        section = training(dataset=kind, dataset_path=str(tmp_path / name), local_batch_size=4)
        loader = build_loader(section, around)
        batches = [batch for _ in range(6) for batch in loader.next_step()]
        found.append([(b.tokens_BS.tolist(), b.labels_BS.tolist()) for b in batches])
    assert all(batches == found[0] for batches in found)


def patch(path, place, content):
    with path.open("r+b") as file:
        file.seek(place)
        file.write(content)


DAMAGE = {
    "x.idx: not an index of Megatron's format": lambda i, b: patch(i, 0, b"TNTIDX\0\0"),
    "x.idx: .* version 1 .begins with": lambda i, b: patch(i, 9, b"\2"),
    "x.idx: holds numbers of float64, which are no": lambda i, b: patch(i, 17, b"\6"),
    "x.idx: holds numbers of unknown type 9, which": lambda i, b: patch(i, 17, b"\x09"),
    "x.idx: has 20 bytes, not the 106 of its header": lambda i, b: os.truncate(i, 20),
    "x.idx: has 145 bytes, not the 154 of its header": lambda i, b: os.truncate(i, 145),
    "x.bin has 17 bytes, not the 18 of the index": lambda i, b: os.truncate(b, 17),
    "x.idx does not exist: name a folder, or NAME of": lambda i, b: i.unlink(),
    "x.bin does not exist: name a folder, or NAME of": lambda i, b: b.unlink(),
    "holds no pair of NAME.bin and NAME.idx": lambda i, b: (i.unlink(), b.unlink()),
    "holds no document": lambda i, b: write_megatron(i.with_suffix(""), []),
}


@pytest.mark.parametrize("line", DAMAGE)
def test_damaged_pair_is_refused_in_one_line(tmp_path, line):
    write_megatron(tmp_path / "x", DOCUMENTS)
    DAMAGE[line](tmp_path / "x.idx", tmp_path / "x.bin")
    with pytest.raises(ConfigError, match=rf"^training\.dataset_path='[^\n]*{line}[^\n]*$"):
        opened(tmp_path)


def test_damage_that_only_shows_when_it_is_read_is_an_error_of_its_document(tmp_path):
    write_megatron(tmp_path / "x", DOCUMENTS)
    corpus = opened(tmp_path)
    bounds = 34 + 12 * 6
    patch(tmp_path / "x.idx", bounds + 8, struct.pack("<q", 99))
    patch(tmp_path / "x.idx", 34 + 4 * 3, struct.pack("<i", -1))
    os.truncate(tmp_path / "x.bin", 17)
    for index, line in ((0, "document 0 is not in"), (3, "document 3 is not in"), (4, "cut short")):
        with pytest.raises(RunError, match=line):
            corpus[index]


@pytest.mark.parametrize("token", [TOKENIZER.vocab_size, -1])
def test_tokens_beyond_the_vocabulary_are_refused(tmp_path, token):
    write_megatron(tmp_path / "x", [[[1, 2]]] * 20 + [[[3, token]]], code=4)
    section = training(dataset="megatron", dataset_path=str(tmp_path), global_batch_size=4)
    line = r"^document x/20 holds tokens .* but the tokenizer has 0 to"
    with pytest.raises(ConfigError, match=line):
        sample_data(section, Validation(), TOKENIZER, seed=0)
