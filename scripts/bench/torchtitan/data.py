"""The text and the tokenizer that compare.py gives to both programs.

The text is the Python standard library's own sources, cut into records of a few thousand
characters; the tokenizer a byte-level BPE of 2,048 tokens trained on them. Both are functions of
the interpreter's version.
"""

import json
import os
from pathlib import Path

VOCAB_SIZE = 2048
EOS = "<|end|>"
_RECORD_CHARACTERS = 4000
_NUM_RECORDS = 1000
_MARK = "complete"


def write_data(folder: Path) -> tuple[Path, Path]:
    """The folders of the data set and of the tokenizer in `folder`; written if not there yet."""
    data, tokenizer = folder / "data", folder / "tokenizer"
    mark = folder / _MARK
    if not mark.exists():
        for place in (data, tokenizer):
            place.mkdir(parents=True, exist_ok=True)
        texts = records()
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (data / "records.jsonl").write_text("".join(lines), encoding="utf-8")
        write_tokenizer(texts, tokenizer)
        mark.touch()
    return data, tokenizer


def records() -> list[str]:
    """Pieces of the standard library's sources, from one end of it to the other."""
    from titan_moe.data.stdlib import StdlibCorpus

    corpus = StdlibCorpus()
    texts = [
        cut
        for number in range(len(corpus))
        for cut in cut_text(str(corpus[number].content), _RECORD_CHARACTERS)
    ]
    every = max(1, len(texts) // _NUM_RECORDS)
    return texts[::every][:_NUM_RECORDS]


def cut_text(text: str, size: int) -> list[str]:
    """`text` in pieces of `size` characters; a last one of less than half of that is left out."""
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    return [piece for piece in pieces if len(piece) >= size // 2]


def write_tokenizer(texts: list[str], folder: Path) -> None:
    """Train a BPE tokenizer of VOCAB_SIZE on `texts`, with the one special token EOS."""
    # With more threads pairs that are equally frequent could be merged in another order.
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=1), encoding="utf-8")
