"""The slow, plain-Python versions that the package is compared with, and small corpora."""

import base64
import json
import os
import random
import subprocess
import sys
from pathlib import Path

from tests.support.paths import REPO
from titan_moe.data.bad_documents import BadDocuments
from titan_moe.data.documents import Document
from titan_moe.data.packing import IGNORE_INDEX

_READ = r"""
import re, sys
import pyarrow.compute, pyarrow.parquet
from titan_moe.config.errors import ConfigError
from titan_moe.data.file_corpus import FileCorpus
from titan_moe.data.hf_datasets import import_quietly

import_quietly()
peak = lambda: int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1])
before = peak()
try:
    FileCorpus(sys.argv[1], sys.argv[2], key="training.")
except ConfigError as error:
    print(error)
print(peak() - before)
"""


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


def read_apart(dataset: str, path: Path) -> tuple[str, int]:
    """What a process says that reads a data set, and the KiB of memory that it took at most."""
    environment = os.environ | {"HF_HOME": str(path.parent / "hf"), "PYTHONPATH": str(REPO)}
    environment.pop("HF_DATASETS_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", _READ, dataset, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    said, kilobytes = done.stdout.splitlines()
    return said, int(kilobytes)
