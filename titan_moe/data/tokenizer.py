"""Text to token ids and back: bytes, a tiktoken BPE file, or a Hugging Face tokenizer folder."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from titan_moe.config.errors import ConfigError

if TYPE_CHECKING:
    import tiktoken

# Llama 3's published splitting rule, and its 256 special tokens in the order of their ids.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPECIAL = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{number}|>" for number in range(4)),
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_special_token_4|>",
    "<|eot_id|>",
    *(f"<|reserved_special_token_{number}|>" for number in range(5, 251)),
]


class Tokenizer(Protocol):
    """Turns text into ids below `vocab_size`. Special tokens in a text are read as plain text."""

    vocab_size: int
    eos_id: int
    bos_id: int | None
    fingerprint: str
    """Names the tokenizer: two with one fingerprint give the same ids."""

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, without BOS and EOS."""

    def decode(self, ids: Any) -> str:
        """Text of `ids` (any iterable of ints); broken UTF-8 becomes U+FFFD."""


def loss_unit(tokenizer: Tokenizer) -> tuple[str, int]:
    """What a loss of these tokens is per, and among how many of them a uniform guess chooses."""
    if isinstance(tokenizer, ByteTokenizer):
        return "byte", 256
    return "token", tokenizer.vocab_size


def load_tokenizer(path: str) -> Tokenizer:
    """Load `model.tokenizer_path`; ConfigError when there is no tokenizer."""
    if path == "bytes":
        return ByteTokenizer()
    place = Path(path).expanduser()
    if place.name == "tokenizer.json":
        place = place.parent
    if not place.exists():
        raise ConfigError([_how_to_get(path, "does not exist")])
    if place.is_dir():
        if not (place / "tokenizer.json").is_file():
            raise ConfigError([_how_to_get(path, "holds no tokenizer.json")])
        return HuggingFaceTokenizer(place)
    return TiktokenTokenizer(place)


class ByteTokenizer:
    """Each byte of the UTF-8 text is a token; three special tokens follow the 256 bytes."""

    bos_id: int | None = 256
    eos_id = 257
    vocab_size = 259
    fingerprint = "bytes"

    def encode(self, text: str) -> np.ndarray:
        # The ids of `encoding()`, a hundred times as fast.
        return np.frombuffer(text.encode(errors="replace"), np.uint8)

    def decode(self, ids: Any) -> str:
        return self.encoding().decode([int(token) for token in ids])

    @staticmethod
    def encoding() -> tiktoken.Encoding:
        """The tiktoken encoding that this tokenizer is."""
        import tiktoken

        return tiktoken.Encoding(
            name="bytes",
            pat_str=r"[\s\S]",
            mergeable_ranks={bytes([byte]): byte for byte in range(256)},
            special_tokens={"<|bos|>": 256, "<|eos|>": 257, "<|pad|>": 258},
        )


class TiktokenTokenizer:
    """A BPE file in Llama 3's layout: a base64 token and its rank on each line."""

    def __init__(self, path: Path) -> None:
        import tiktoken

        content = _read(path)
        ranks = _parse_ranks(path, content)
        special = {name: len(ranks) + number for number, name in enumerate(_LLAMA3_SPECIAL)}
        self._encoding = tiktoken.Encoding(
            name=path.name, pat_str=_LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens=special
        )
        self.vocab_size = self._encoding.n_vocab
        self.eos_id = special["<|end_of_text|>"]
        self.bos_id: int | None = special["<|begin_of_text|>"]
        self.fingerprint = f"tiktoken:{_digest(content)}"

    def encode(self, text: str) -> np.ndarray:
        return self._encoding.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids: Any) -> str:
        return self._encoding.decode([int(token) for token in ids])


class HuggingFaceTokenizer:
    """A folder with tokenizer.json, and the names of EOS and BOS in one of the two config files."""

    def __init__(self, folder: Path) -> None:
        import tokenizers

        content = _read(folder / "tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # The library raises bare Exception.
            raise ConfigError(
                [f"model.tokenizer_path={str(folder)!r}: tokenizer.json is not readable: {error}"]
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # A text cannot smuggle in an EOS.
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1  # Ids may have gaps.
        names = _special_names(folder)
        eos_id = ids.get(names.get("eos_token", ""))
        if eos_id is None:
            raise ConfigError(
                [
                    f"model.tokenizer_path={str(folder)!r} names no eos_token of its vocabulary: "
                    "add the tokenizer_config.json or special_tokens_map.json of the same model"
                ]
            )
        self.eos_id = eos_id
        self.bos_id: int | None = ids.get(names.get("bos_token", ""))
        self.fingerprint = f"huggingface:{_digest(content)}:eos={eos_id}"

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)

    def decode(self, ids: Any) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)


def _special_names(folder: Path) -> dict[str, str]:
    """eos_token and bos_token, from tokenizer_config.json before special_tokens_map.json."""
    names: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        if not (folder / file).is_file():
            continue
        try:
            table = json.loads(_read(folder / file))
        except ValueError as error:
            raise ConfigError(
                [f"model.tokenizer_path={str(folder)!r}: {file} is no JSON: {error}"]
            ) from None
        for key in ("eos_token", "bos_token"):
            token = table.get(key)
            if token is not None:
                names[key] = token["content"] if isinstance(token, dict) else token
    return names


def _parse_ranks(path: Path, content: bytes) -> dict[bytes, int]:
    # Not tiktoken's own reader: it caches by path, and would serve the old file after a change.
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ConfigError(
                [
                    f"model.tokenizer_path={str(path)!r} is no tiktoken BPE file: line {number} is "
                    "not a base64 token and its rank; for a Hugging Face tokenizer name its folder"
                ]
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
        raise ConfigError(
            [
                f"model.tokenizer_path={str(path)!r} is no whole tiktoken BPE file: its "
                f"{len(ranks)} ranks do not count from 0 to at least 255; download it again"
            ]
        )
    return ranks


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            [f"model.tokenizer_path: {str(path)!r} cannot be read: {error.strerror}"]
        ) from None


def _how_to_get(path: str, problem: str) -> str:
    return (
        f"model.tokenizer_path={path!r} {problem}: use 'bytes', or download tokenizer.json and "
        "tokenizer_config.json of a Hugging Face model into a folder of that name "
        "(`hf download MODEL tokenizer.json tokenizer_config.json --local-dir FOLDER`), or put "
        "original/tokenizer.model of a Llama 3 model there"
    )


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
