"""Ranks divide the validation set between them, and each reads what one alone would."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tests.support.documents import random_texts, write_jsonl
from tests.support.trainings import make_job
from titan_moe.data import validation
from titan_moe.data.batch import fingerprints
from titan_moe.models.hf import model_of_job
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.train_data import TrainData

_NUM_DOCUMENTS = 100


def read(folder: Path, num_data_ranks: int, bad: int = -1) -> tuple[list[list[int]], list[str]]:
    """Fingerprints of this rank's batches, and the documents that it has tokenized. One rank cannot
    read document `bad`."""
    rank, names = dist.get_rank(), []
    encode = validation.encode_document

    def encode_and_note(document, tokenizer):
        if document.name == f"json/{bad}":
            raise RunError(f"{document.name} cannot be read")
        names.append(document.name)
        return encode(document, tokenizer)

    own = {"dataset": "json", "dataset_path": str(folder / "v.jsonl"), "local_batch_size": 2}
    job = make_job(folder, model={"tokenizer_path": "bytes"}, validation={"enable": True, **own})
    process = SimpleNamespace(device=SimpleNamespace(type="cpu"), rank=rank, is_main=rank == 0)
    dims = SimpleNamespace(
        coordinate=lambda rank, axis: rank % num_data_ranks if axis == "batch" else 0,
        size=lambda axis: num_data_ranks,
    )
    data = TrainData(job, model_of_job(job.model), process)
    data.open(job, dims)
    validation.encode_document = encode_and_note
    try:
        return [fingerprints(batch) for batch in data.validation], names
    finally:
        validation.encode_document = encode
        data.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "v.jsonl", random_texts(_NUM_DOCUMENTS))
    return tmp_path


def test_each_document_is_tokenized_by_one_rank(folder: Path) -> None:
    """Two data ranks of two ranks each, which read the same sequences."""
    ((alone, everything),) = run_on_ranks(read, 1, folder, 1)
    assert len(everything) == _NUM_DOCUMENTS
    ranks = run_on_ranks(read, 4, folder, 2)
    assert sorted(name for _, names in ranks for name in names) == sorted(everything)
    assert ranks[0][0] == ranks[2][0] and ranks[1][0] == ranks[3][0]
    together = [
        sequence
        for step in zip(ranks[0][0], ranks[1][0], strict=True)
        for batch in step
        for sequence in batch
    ]
    sequences = [sequence for batch in alone for sequence in batch]
    assert together[: len(sequences)] == sequences


def test_document_that_one_rank_cannot_read_ends_all_ranks(folder: Path) -> None:
    assert run_on_ranks(read_in_vain, 2, folder) == ["json/50 cannot be read"] * 2


def read_in_vain(folder: Path) -> str:
    with pytest.raises(RunError) as error:
        read(folder, 2, bad=50)
    return str(error.value)
