"""Encodings of texts: bytes, and tokenizers of two libraries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from titan_moe.data.conversations import Spans

if TYPE_CHECKING:
    import tokenizers


class ByteEncoding:
    """Each byte of the UTF-8 text is a token; three special tokens follow the 256 bytes."""

    vocab_size = 259
    ends = ("<|bos|>", "<|eos|>")
    added = ()
    special = MappingProxyType({"<|bos|>": 256, "<|eos|>": 257})

    def id_of(self, name: str) -> int | None:
        return self.special.get(name)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(errors="replace"), np.uint8)

    def encode_spans(self, text: str) -> Spans:
        """Reads the special tokens, which `encode` does not."""
        found: list[tuple[int, int, int]] = []
        at = 0
        for piece in re.split("(" + "|".join(map(re.escape, self.special)) + ")", text):
            if piece in self.special:
                found.append((self.special[piece], at, at + len(piece)))
            else:
                encoded = enumerate((char.encode(errors="replace") for char in piece), at)
                found += [(byte, begin, begin + 1) for begin, char in encoded for byte in char]
            at += len(piece)
        return Spans(*np.array(found, np.int64).reshape(-1, 3).T)

    def decode(self, ids: list[int]) -> str:
        """Special tokens are left out."""
        return bytes(token for token in ids if token < 256).decode(errors="replace")


class HuggingFaceEncoding:
    """A tokenizer of the `tokenizers` library."""

    ends = ("", "")

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, parse: bool) -> None:
        """`parse`: special tokens are read as tokens inside texts."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = not parse
        self._tokenizer = tokenizer
        self.added = tokenizer.encode("").ids  # What the file itself puts around a text.
        ids = tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids) + 1  # Ids may have gaps.

    def id_of(self, name: str) -> int | None:
        return self._tokenizer.token_to_id(name)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)

    @property
    def special(self) -> Mapping[str, int]:
        """Texts that are one token each, with their ids."""
        found = self._tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in found.items()}

    def encode_spans(self, text: str) -> Spans:
        """Ids, and of each the characters that it stands for."""
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        begins, ends = np.array(encoded.offsets, np.int64).reshape(-1, 2).T
        return Spans(np.array(encoded.ids, np.int64), begins, ends)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class SentencePieceEncoding:
    """A model of sentencepiece. transformers' conversion gives other ids to texts that begin with
    blanks (5.24)."""

    added = ()

    def __init__(self, content: bytes, *, parse: bool) -> None:
        import sentencepiece

        if parse:
            raise ValueError("training.parse_special_tokens needs the model's tokenizer.json")
        self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
        self.vocab_size = self._model.vocab_size()
        ends = (self._model.bos_id(), self._model.eos_id())
        self.ends = tuple("" if end < 0 else self._model.id_to_piece(end) for end in ends)

    def id_of(self, name: str) -> int | None:
        number = self._model.piece_to_id(name)
        return number if self._model.id_to_piece(number) == name else None

    def encode(self, text: str) -> np.ndarray:
        ids = self._model.encode(text.encode(errors="replace").decode())
        return np.array(ids, np.uint32)

    def decode(self, ids: list[int]) -> str:
        return self._model.decode(ids)
