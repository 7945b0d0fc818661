"""The slow, plain-Python versions that the package is compared with, and small corpora."""

import base64
import json
import random

from titan_moe.data.bad_documents import BadDocuments
from titan_moe.data.documents import Document
from titan_moe.data.packing import IGNORE_INDEX


class ListCorpus:
    """A corpus of given texts."""

    def __init__(self, texts, fingerprint="list"):
        self.texts, self.fingerprint, self.left_out = texts, fingerprint, BadDocuments()

    def checksum(self):
        return ""

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return Document(f"list/{index}", self.texts[index])


def slow_rows(documents, *, seq_len, mask):
    """Full rows (tokens, labels, documents, names) of a list of (name, ids with EOS)."""
    stream = [(token, number) for number, (_, ids) in enumerate(documents) for token in ids]
    rows = []
    for first in range(0, len(stream) - seq_len, seq_len):
        piece = stream[first : first + seq_len + 1]
        tokens = [token for token, _ in piece[:-1]]
        labels = [
            IGNORE_INDEX if mask and piece[i][1] != piece[i + 1][1] else piece[i + 1][0]
            for i in range(seq_len)
        ]
        opened = [number - piece[0][1] for _, number in piece[:-1]]
        names = [documents[number][0] for number in sorted({number for _, number in piece[:-1]})]
        rows.append((tokens, labels, opened, names))
    return rows


def random_texts(count, *, seed=0, longest=200):
    """Texts of uneven lengths, some empty, some not ASCII."""
    draw = random.Random(seed)
    return ["".join(draw.choices("abcdé \n", k=draw.randrange(longest))) for _ in range(count)]


def write_jsonl(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def write_bpe(path, merges=(b"re", b"tu", b"retu")):
    tokens = [bytes([byte]) for byte in range(256)] + list(merges)
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)
