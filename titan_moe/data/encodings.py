"""Encodings of texts: bytes, and tokenizers of two libraries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from titan_moe.data.conversations import Spans

if TYPE_CHECKING:
    import tokenizers

_BLANK = "\u2581"  # Stands for one in sentencepiece's tokens.
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # A token of one byte, beside tokens of texts.


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

    def bytes_of(self, number: int) -> bytes:
        """The bytes that a token stands for, unless it is special."""
        return bytes([number]) if number < 256 else b""


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

    def bytes_of(self, number: int) -> bytes:
        """The bytes that a token stands for, unless it is special."""
        token = self._tokenizer.id_to_token(number) or ""
        decoder = self._tokenizer.decoder
        if decoder is not None and decoder.decode(["a\u0120a"]) == "a a":
            return bytes(_bytes_by_char()[char] for char in token)
        return _bytes_of_piece(token)


@cache
def _bytes_by_char() -> Mapping[str, int]:
    """The byte that each character stands for in tokens of GPT-2's kind: itself if it is printed,
    the others in order of the characters behind."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    in_order = sorted(range(256), key=lambda byte: chr(byte) not in alphabet)
    return dict(zip(alphabet, in_order, strict=True))


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

    @property
    def special(self) -> Mapping[str, int]:
        """Tokens that no text has, with their ids."""
        model = self._model
        return {model.id_to_piece(n): n for n in range(self.vocab_size) if model.is_control(n)}

    def bytes_of(self, number: int) -> bytes:
        """The bytes that a token stands for, unless it is special."""
        return _bytes_of_piece(self._model.id_to_piece(number))


def _bytes_of_piece(token: str) -> bytes:
    """The bytes of one of sentencepiece's tokens: of a text, or the byte that it numbers."""
    if _BYTE.fullmatch(token):
        return bytes.fromhex(token[3:5])
    return token.replace(_BLANK, " ").encode()
