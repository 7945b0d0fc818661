"""Data sets of conversations, and what a run reads of them."""

import json

import pyarrow.json
from pyarrow import parquet

from tests.support.documents import with_batch
from titan_moe.config.job_config import Training
from titan_moe.data.batch import IGNORE_INDEX
from titan_moe.data.build import build_reader
from titan_moe.data.loader import merge_states
from titan_moe.data.tokenizer import load_tokenizer

SIZE = 4
"""Sequences of a batch of all ranks."""


def talk(question, answer):
    """Returns the messages of a question and its answer."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def training(path, dataset="json", **keys):
    """Returns the section of a run that reads conversations, 128 bytes in a sequence."""
    own = {"dataset_format": "messages", "seq_len": 128, "local_batch_size": 1}
    return Training(dataset=dataset, dataset_path=str(path), **(own | keys))


def write(path, records):
    """Writes records as JSON lines, and returns the path."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def as_parquet(path):
    """Writes a Parquet file beside JSON lines, and returns its path."""
    parquet.write_table(pyarrow.json.read_json(path), path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def read(section, *, ranks=1, steps=3, state=None, size=SIZE, lengths=None):
    """Returns the sequences of some steps, in the order of the global batch, and the state of all
    ranks."""
    tokenizer = load_tokenizer("bytes", section)
    section = with_batch(section, size)
    place = {"seed": 3, "num_ranks": ranks, "lengths": lengths}
    readers = [build_reader(section, tokenizer, rank=rank, **place) for rank in range(ranks)]
    for reader in readers if state else ():
        reader.load_state_dict(state)
    found = []
    for _ in range(steps):
        microbatches = [reader.read_step() for reader in readers]
        found += [row for rank in microbatches for microbatch in rank for row in microbatch]
    return found, merge_states([reader.state_dict() for reader in readers])


def learned(sequences):
    """Returns the targets of each document, as text."""
    return [
        load_tokenizer("bytes").decode(row.labels_S[(row.documents_S == number) & targets])
        for row in sequences
        for targets in [row.labels_S != IGNORE_INDEX]
        for number in range(len(row.samples))
    ]
