"""Small corpora, and slow versions in plain Python of what the package does with documents."""

import base64
import json
import random
import struct
import zlib

import numpy as np

from titan_moe.config.job_config import Training, Validation
from titan_moe.data.batch import IGNORE_INDEX
from titan_moe.data.build import build_reader
from titan_moe.data.loader import Loader, merge_states
from titan_moe.data.order import mix
from titan_moe.data.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer("bytes")


def with_batch(section: Training, size: int) -> Training:
    """Returns the table with so many sequences in a global batch."""
    return section.model_copy(update={"global_batch_size": size})


def build_loader(section, tokenizer=TOKENIZER, *, global_batch_size=8, **place) -> Loader:
    """Returns a loader that reads in this process, of the only rank by default.

    `place`: keywords of `build_reader`.
    """
    reader = build_reader(with_batch(section, global_batch_size), tokenizer, **{"seed": 0} | place)
    return Loader(reader, prefetch_factor=section.dataloader.prefetch_factor)


def loaders_of(section: Training, num_ranks: int, *, seed: int, rows: int) -> list[Loader]:
    """Returns all ranks' loaders of a run that holds documents out."""
    place = {"seed": seed, "num_ranks": num_ranks, "global_batch_size": rows}
    held_out = Validation(enable=True)
    return [
        build_loader(section, validation=held_out, rank=rank, **place) for rank in range(num_ranks)
    ]


def take(loaders, steps):
    """Global batches by step: (tokens, labels, documents, names) of every sequence."""
    found = []
    for _ in range(steps):
        batches = [batch for loader in loaders for batch in loader.next_step()]
        found.append(
            [
                (tokens.tolist(), labels.tolist(), documents.tolist(), names)
                for batch in batches
                for tokens, labels, documents, names in zip(
                    batch.tokens_BS, batch.labels_BS, batch.documents_BS, batch.samples, strict=True
                )
            ]
        )
    return found


def position(loaders):
    """Returns the data position of all loaders, as a checkpoint keeps it."""
    return json.loads(json.dumps(merge_states([loader.state_dict() for loader in loaders])))


def training(**keys):
    return Training(**({"dataset": "synthetic", "seq_len": 64, "local_batch_size": 2} | keys))


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


def is_held_out(text, every=64):
    """True for the documents of a stream that training leaves to validation."""
    return mix(zlib.crc32(text.encode())) % every == 0


def random_texts(count, *, seed=0, longest=200):
    """Texts of uneven lengths, some empty, some not ASCII."""
    draw = random.Random(seed)
    return ["".join(draw.choices("abcdé \n", k=draw.randrange(longest))) for _ in range(count)]


def write_jsonl(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def write_ranks(path, merges=()):
    """A file of base64 tokens and ranks: the bytes and `merges`. Returns its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = [*(bytes([byte]) for byte in range(256)), *merges]
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    path.write_bytes(b"".join(lines))
    return str(path.parent)


def write_hub(folder, texts, num_files=5):
    """A local copy of a hub dataset in several files of unequal numbers of documents. Blank lines
    make the files equally large, as a stream must find them to give each a partition."""
    paths = [folder / f"part-{file:02d}.json" for file in range(num_files)]
    for file, path in enumerate(paths):
        first, last = (len(texts) * n**2 // num_files**2 for n in (file, file + 1))
        write_jsonl(path, texts[first:last])
    largest = max(path.stat().st_size for path in paths)
    for path in paths:
        path.write_bytes(path.read_bytes().ljust(largest, b"\n"))
    return str(folder)


def write_files(folder, counts):
    """A local copy of a hub dataset in files of given numbers of documents, all of 32 bytes;
    returns all texts."""
    texts = [
        [f"{file}:{n}".ljust(32, ".") for n in range(count)] for file, count in enumerate(counts)
    ]
    for file, of_file in enumerate(texts):
        write_jsonl(folder / f"part-{file:02d}.json", of_file)
    return [text for of_file in texts for text in of_file]


def write_megatron(prefix, documents, *, code=8, modes=False):
    """A pair of Megatron-LM's files. documents: for each the ids of its sequences. code: of the
    ids' type, as published; modes: the set has a byte for each sequence, as for images."""
    kind = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}[code]
    sequences = [np.array(ids, kind) for document in documents for ids in document]
    ends = np.cumsum([0] + [sequence.nbytes for sequence in sequences])
    bounds = np.cumsum([0] + [len(document) for document in documents])
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_name(f"{prefix.name}.bin").write_bytes(b"".join(map(bytes, sequences)))
    prefix.with_name(f"{prefix.name}.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(sequences), len(bounds))
        + np.array([len(sequence) for sequence in sequences], "<i4").tobytes()
        + ends[:-1].astype("<i8").tobytes()
        + bounds.astype("<i8").tobytes()
        + bytes(len(sequences)) * modes
    )
