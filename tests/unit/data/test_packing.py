import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.documents import slow_rows
from titan_moe.data.batch import IGNORE_INDEX as IGNORED
from titan_moe.data.batch import Encoded, Packer

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
    targets = sum(int((row.labels_S != IGNORED).sum()) for row in rows)
    assert targets == max(0, len(stream) - 1 - first_tokens)


@pytest.mark.parametrize("lengths", [[], [0]])
def test_nothing_to_predict_is_no_row(lengths):
    assert pack([("a", [EOS]) for _ in lengths], seq_len=4, mask=True) == []
