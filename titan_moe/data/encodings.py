"""Encodings of texts: bytes, and tokenizers of three libraries.

`tiktoken` runs files of ranks (Kimi's, Llama 3's) and Mistral's tekken.json.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_moe.data.conversations import Spans

if TYPE_CHECKING:
    import tokenizers

_BLANK = "\u2581"  # Stands for one in sentencepiece's tokens.
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # A token of one byte, beside tokens of texts.


class _Encoding:
    vocab_size: int
    special: Mapping[str, int]
    """Texts that are one token each, with their ids."""
    added: Sequence[int] = ()
    """Ids that the file itself puts around a text."""
    ends: tuple[str, ...] = ("", "")
    """Tokens that begin and end a text where no other file names them."""

    def id_of(self, name: str) -> int | None:
        return self.special.get(name)


class ByteEncoding(_Encoding):
    """Each byte of the UTF-8 text is a token; three special tokens follow the 256 bytes."""

    vocab_size = 259
    ends = ("<|bos|>", "<|eos|>")
    special = MappingProxyType({"<|bos|>": 256, "<|eos|>": 257})

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


class HuggingFaceEncoding(_Encoding):
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, parse: bool) -> None:
        """`parse`: special tokens are read as tokens inside texts."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = not parse
        self._tokenizer = tokenizer
        self.added = tokenizer.encode("").ids
        found = tokenizer.get_added_tokens_decoder()
        self.special = {token.content: number for number, token in found.items()}
        ids = tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids) + 1  # Ids may have gaps.

    def id_of(self, name: str) -> int | None:
        return self._tokenizer.token_to_id(name)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)

    def encode_spans(self, text: str) -> Spans:
        """Returns ids, each with its first and last + 1 character."""
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


class SentencePieceEncoding(_Encoding):
    """A model of sentencepiece. transformers' conversion gives other ids to texts that begin with
    blanks (5.24)."""

    def __init__(self, content: bytes, *, parse: bool) -> None:
        import sentencepiece

        if parse:
            raise ValueError("training.parse_special_tokens needs the model's tokenizer.json")
        self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
        self.vocab_size = self._model.vocab_size()
        ends = (self._model.bos_id(), self._model.eos_id())
        self.ends = tuple("" if end < 0 else self._model.id_to_piece(end) for end in ends)
        control = filter(self._model.is_control, range(self.vocab_size))
        self.special = {self._model.id_to_piece(number): number for number in control}

    def id_of(self, name: str) -> int | None:
        number = self._model.piece_to_id(name)
        return number if self._model.id_to_piece(number) == name else None

    def encode(self, text: str) -> np.ndarray:
        ids = self._model.encode(text.encode(errors="replace").decode())
        return np.array(ids, np.uint32)

    def decode(self, ids: list[int]) -> str:
        return self._model.decode(ids)

    def bytes_of(self, number: int) -> bytes:
        """The bytes that a token stands for, unless it is special."""
        return _bytes_of_piece(self._model.id_to_piece(number))


def _bytes_of_piece(token: str) -> bytes:
    """Returns the bytes of a token of sentencepiece's, which is a text or numbers a byte."""
    if _BYTE.fullmatch(token):
        return bytes.fromhex(token[3:5])
    return token.replace(_BLANK, " ").encode()


# --- tiktoken ---

# Split patterns are part of a tokenizer, but a file of ranks does not hold them.
_WORD_END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_PATTERN = rf"{_WORD_END}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{_REST}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_WORDS = (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
_KIMI_WORDS = "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{word}{_WORD_END}?" for word in _WORDS)
_KIMI_PATTERN = rf"[\p{{Han}}]+|{_KIMI_WORDS}|{_REST}"

_LLAMA3_RANKS = 128_000
_NUM_SPECIAL = 256  # Kimi and Llama 3 have so many special tokens, whose ids follow the ranks.
_RESERVED = [f"<|reserved_special_token_{number}|>" for number in range(251)]
_LLAMA3_NAMES = ["<|begin_of_text|>", "<|end_of_text|>", *_RESERVED[:4], "<|start_header_id|>"]
_LLAMA3_NAMES += ["<|end_header_id|>", _RESERVED[4], "<|eot_id|>", *_RESERVED[5:]]
# BOS and EOS of Kimi, Llama 3 and Mistral, where no other file names them.
_ENDS = (("[BOS]", "[EOS]"), ("<|begin_of_text|>", "<|end_of_text|>"), ("<s>", "</s>"))

_RANK_LINE = re.compile(rb"\s*[A-Za-z0-9+/]+={0,2}[ \t]+\d+\s")
_TEKKEN = re.compile(rb'"token_bytes"\s*:\s*"')
# From somewhere between 400,000 and 1,000,000 blanks on, tiktoken's regular expressions overflow
# their stack, which ends the process. Kimi's own code cuts at this length too.
_LONGEST_SPACE = 25_000


class TiktokenEncoding(_Encoding):
    """Ids that `tiktoken` gives to texts."""

    def __init__(
        self, pattern: str, ranks: dict[bytes, int], names: dict[int, str], *, parse: bool
    ) -> None:
        """`names`: special tokens by id. `parse`: they are read as tokens inside texts.

        ValueError if a byte has no rank or two special tokens have one name.
        """
        import tiktoken

        if missing := sum(bytes([byte]) not in ranks for byte in range(256)):
            raise ValueError(f"{missing} of the 256 bytes have no rank: download it again")
        self.special = {name: number for number, name in names.items()}
        if len(self.special) != len(names):
            raise ValueError("two special tokens have one name")
        self._tiktoken = tiktoken.Encoding(
            "file", pat_str=pattern, mergeable_ranks=ranks, special_tokens=self.special
        )
        self._allowed = set(self.special) if parse else set()
        self.ends = next((ends for ends in _ENDS if {*ends} <= {*self.special}), ("", ""))
        self.vocab_size = self._tiktoken.n_vocab

    def encode(self, text: str) -> np.ndarray:
        how: dict[str, Any] = {"allowed_special": self._allowed, "disallowed_special": ()}
        pieces = [self._tiktoken.encode_to_numpy(piece, **how) for piece in _cut_blanks(text)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def encode_spans(self, text: str) -> Spans:
        """Returns ids, each with its first and last + 1 character."""
        ids = self.encode(text).astype(np.int64)
        _, begins = self._tiktoken.decode_with_offsets(ids.tolist())
        # Several tokens may stand for one character.
        ends = np.maximum(np.array([*begins[1:], len(text)]), np.array(begins) + 1)
        return Spans(ids, np.array(begins), ends)

    def decode(self, ids: list[int]) -> str:
        return self._tiktoken.decode(ids)

    def bytes_of(self, number: int) -> bytes:
        """The bytes that a token stands for, unless it is special."""
        return self._tiktoken.decode_single_token_bytes(number)


def _cut_blanks(text: str) -> Iterator[str]:
    start = 0
    for run in re.finditer(rf"(?<!\s)\s{{{_LONGEST_SPACE + 1},}}", text):
        for end in range(run.start() + _LONGEST_SPACE, run.end(), _LONGEST_SPACE):
            yield text[start:end]
            start = end
    yield text[start:]


def read_tiktoken(
    content: bytes, config: dict[str, Any], *, parse: bool
) -> TiktokenEncoding | None:
    """The tokenizer of a file, told by its content; None if it is none of tiktoken's.

    config: tokenizer_config.json. Raises ValueError, KeyError or TypeError for a damaged file.
    """
    if _RANK_LINE.match(content):
        return _read_ranks(content, config, parse)
    if content.lstrip()[:1] == b"{" and _TEKKEN.search(content):
        return _read_tekken(json.loads(content), parse)
    return None


def _read_ranks(content: bytes, config: dict[str, Any], parse: bool) -> TiktokenEncoding:
    """Kimi's tokenizer, if tokenizer_config.json names Kimi's class in Python, which does not run;
    otherwise Llama 3's."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.strip().splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ValueError(f"line {number} is not a base64 token and its rank") from None
    count = len(ranks)
    if sorted(ranks.values()) != list(range(count)):
        raise ValueError(f"its {count:,} ranks do not count from 0: download it again")
    classes = [config.get("tokenizer_class"), config.get("auto_map")]
    is_kimi = "TikTokenTokenizer" in json.dumps(classes)
    if not is_kimi and count > _LLAMA3_RANKS:
        raise ValueError(
            f"its {count:,} ranks are not Llama 3's, and tokenizer_config.json beside it does not "
            "name Kimi's TikTokenTokenizer, so its split pattern is not known: download that file, "
            "or the tokenizer.json of the same model"
        )
    decoder = config.get("added_tokens_decoder") or {}
    names = {int(number): token["content"] for number, token in decoder.items()}
    if not names and not is_kimi:
        names = dict(enumerate(_LLAMA3_NAMES, count))
    special = range(count, count + _NUM_SPECIAL)
    names = {number: names.get(number, f"<|reserved_token_{number}|>") for number in special}
    pattern = _KIMI_PATTERN if is_kimi else _LLAMA3_PATTERN
    return TiktokenEncoding(pattern, ranks, names, parse=parse)


def _read_tekken(table: dict[str, Any], parse: bool) -> TiktokenEncoding:
    """The ids of special tokens come first, and the ranks follow."""
    config, special = table["config"], table.get("special_tokens")
    if not special:
        raise ValueError("it names no special_tokens: download the tokenizer.json of the model")
    names = {token["rank"]: token["token_str"] for token in special}
    first = config.get("default_num_special_tokens", len(special))
    vocab = table["vocab"][: config.get("default_vocab_size", len(table["vocab"]) + first) - first]
    ranks = {base64.b64decode(token["token_bytes"]): first + n for n, token in enumerate(vocab)}
    names = {number: names.get(number, f"<SPECIAL_{number}>") for number in range(first)}
    return TiktokenEncoding(config["pattern"], ranks, names, parse=parse)
