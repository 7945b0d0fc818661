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
from titan_moe.runtime.files import parse_json

if TYPE_CHECKING:
    import tiktoken

# Llama 3's published splitting rule, and its 256 special tokens in the order of their ids.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_RANKS = 128_000
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
    """A BPE file in Llama 3's layout: a base64 token and its rank on each line.

    The file holds neither the split rule nor the special tokens: both are Llama 3's. A file with
    more ranks than Llama 3's is refused. A smaller one may be the user's own.
    """

    def __init__(self, path: Path) -> None:
        import tiktoken

        content = _read(path)
        ranks = _parse_ranks(path, content)
        if len(ranks) > _LLAMA3_RANKS:
            raise ConfigError(
                [
                    f"model.tokenizer_path={str(path)!r} has {len(ranks):,} ranks, not Llama 3's "
                    f"{_LLAMA3_RANKS:,} or fewer: another model's file (Llama 4 has 200,000) "
                    "splits text in another way; name the folder of that model's tokenizer.json"
                ]
            )
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
    """A folder with tokenizer.json, and what transformers reads beside it: tokens that it adds, and
    the names of EOS and BOS."""

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
        special = _special_tokens(folder)
        added = self._add(special.added)
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1  # Ids may have gaps.
        eos_id = ids.get(special.names.get("eos_token", ""))
        if eos_id is None:
            raise ConfigError(
                [
                    f"model.tokenizer_path={str(folder)!r} names no eos_token: "
                    "add the tokenizer_config.json or special_tokens_map.json of the same model"
                ]
            )
        self.eos_id = eos_id
        self.bos_id: int | None = ids.get(special.names.get("bos_token", ""))
        self.fingerprint = f"huggingface:{_digest(content)}:eos={eos_id}"
        if added:
            self.fingerprint += f":added={_digest(json.dumps(added).encode())}"

    def _add(self, tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add those that make a difference, and return them."""
        import tokenizers

        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        known = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        new = [
            token
            for token in tokens
            if token["content"] not in known
            and not (token["special"] and token["content"] in vocabulary)
        ]
        self._tokenizer.add_tokens([tokenizers.AddedToken(**token) for token in new])
        return new

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)

    def decode(self, ids: Any) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)


class _SpecialTokens:
    """What stands beside a tokenizer.json, by transformers' rules.

    added_tokens_decoder in tokenizer_config.json, a table from ids to tokens, is the newer form: it
    alone counts. Without it special_tokens_map.json goes before tokenizer_config.json, and
    added_tokens.json, from tokens to ids, says what is added. New tokens get the next free ids in
    the order of their numbers there, then the EOS and BOS that are still missing. (Other special
    tokens, such as padding, never come up here.)
    """

    def __init__(self, folder: Path) -> None:
        config = _read_table(folder, "tokenizer_config.json")
        mapped = _read_table(folder, "special_tokens_map.json")
        decoder = config.get("added_tokens_decoder")
        tables = [config, mapped] if decoder is None else [mapped, config]
        named = {
            key: _token(table[key])
            for table in tables
            for key in ("bos_token", "eos_token")
            if table.get(key) is not None
        }
        self.names = {key: token["content"] for key, token in named.items()}
        specials = set(self.names.values())
        if decoder is not None:
            by_id = {int(number): _token(token) for number, token in decoder.items()}
        else:
            more = mapped.get("additional_special_tokens") or []
            specials |= {_token(token)["content"] for token in more}
            by_id = {
                int(number): {"content": content, "normalized": content not in specials}
                for content, number in _read_table(folder, "added_tokens.json").items()
            }
        order = [by_id[number] for number in sorted(by_id)]
        order += [named[key] for key in ("bos_token", "eos_token") if key in named]
        unique = {token["content"]: token for token in reversed(order)}
        self.added = [
            token | {"special": token.get("special", False) or token["content"] in specials}
            for token in order
            if token is unique[token["content"]]
        ]


def _special_tokens(folder: Path) -> _SpecialTokens:
    try:
        return _SpecialTokens(folder)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ConfigError(
            [
                f"model.tokenizer_path={str(folder)!r}: special tokens are not understood: "
                "download tokenizer_config.json, special_tokens_map.json and added_tokens.json of "
                "the same model again"
            ]
        ) from None


def _token(value: Any) -> dict[str, Any]:
    """The fields of a token that is given by its text alone, or as a table."""
    if isinstance(value, str):
        return {"content": value, "normalized": False}
    if not isinstance(value["content"], str):
        raise TypeError(value)
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    kept = {field: value[field] for field in flags if field in value}
    if not all(isinstance(flag, bool) for flag in kept.values()):
        raise TypeError(value)
    return {"content": value["content"], **kept}


def _read_table(folder: Path, file: str) -> dict[str, Any]:
    """A JSON table; an empty one where there is no such file."""
    if not (folder / file).is_file():
        return {}
    try:
        table = parse_json(_read(folder / file))
    except ValueError as error:
        problem = f"is no JSON: {error}"
    else:
        if isinstance(table, dict):
            return table
        problem = "is no table"
    raise ConfigError([f"model.tokenizer_path={str(folder)!r}: {file} {problem}"])


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
        f"model.tokenizer_path={path!r} {problem} (left out, it is model.hf_assets_path): use "
        "'bytes', or download tokenizer.json and tokenizer_config.json of a Hugging Face model to "
        "a folder of that name (`hf download MODEL tokenizer.json tokenizer_config.json "
        "--local-dir FOLDER`), or put original/tokenizer.model of a Llama 3 model there"
    )


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
