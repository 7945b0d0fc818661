"""Text to token ids and back: bytes, or a Hugging Face tokenizer folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from titan_moe.config.errors import ConfigError


class ByteTokenizer:
    """Each byte of the UTF-8 text is a token; three special tokens follow the 256 bytes."""

    bos_id: int | None = 256
    eos_id = 257
    vocab_size = 259
    fingerprint = "bytes"
    """Names the tokenizer: two with one fingerprint give the same ids."""

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, without BOS and EOS. Names of special tokens are read as plain text."""
        return np.frombuffer(text.encode(errors="replace"), np.uint8)

    def decode(self, ids: Any) -> str:
        """Text of `ids` (any iterable of ints); broken UTF-8 becomes U+FFFD, and special tokens are
        left out."""
        return bytes(int(token) for token in ids if token < 256).decode(errors="replace")


class HuggingFaceTokenizer:
    """A folder with tokenizer.json, and the names of EOS and BOS in tokenizer_config.json or
    special_tokens_map.json beside it."""

    def __init__(self, folder: Path) -> None:
        import tokenizers

        prefix = f"model.tokenizer_path={str(folder)!r}"
        content = _read(folder / "tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8-sig"))
        except Exception as error:  # The library raises bare Exception.
            raise ConfigError([f"{prefix}: tokenizer.json is not readable: {error}"]) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # A text cannot smuggle in an EOS.
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1  # Ids may have gaps.
        try:
            names, added = _special_tokens(folder)
        except (KeyError, TypeError, ValueError, AttributeError):
            names, added = {}, []
        if missing := [name for name in added if name not in ids]:
            raise ConfigError(
                [
                    f"{prefix}: tokenizer.json lacks {missing[0]!r}, which the files beside it "
                    "add: load and save the tokenizer with transformers, which writes all tokens "
                    "to tokenizer.json"
                ]
            )
        eos_id = ids.get(names.get("eos_token", ""))
        if eos_id is None:
            raise ConfigError(
                [
                    f"{prefix} names no eos_token that is understood: download the "
                    "tokenizer_config.json and special_tokens_map.json of the same model"
                ]
            )
        self.eos_id = eos_id
        self.bos_id: int | None = ids.get(names.get("bos_token", ""))
        self.fingerprint = f"huggingface:{_digest(content)}:eos={eos_id}"

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)

    def decode(self, ids: Any) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)


def _special_tokens(folder: Path) -> tuple[dict[str, str], list[str]]:
    """The contents of EOS and BOS by name, and of the tokens added to tokenizer.json.

    By transformers' rules: added_tokens_decoder in tokenizer_config.json is the newer form, and
    goes before special_tokens_map.json and added_tokens.json.
    """
    config, mapped, added = (
        json.loads(_read(folder / name)) if (folder / name).is_file() else {}
        for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    )
    decoder = config.get("added_tokens_decoder")
    table = mapped | config if decoder is not None else config | mapped
    names = {key: _content(table[key]) for key in ("eos_token", "bos_token") if table.get(key)}
    return names, list(added) if decoder is None else [
        _content(token) for token in decoder.values()
    ]


def _content(token: str | dict[str, str]) -> str:
    return token if isinstance(token, str) else token["content"]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            [f"model.tokenizer_path: {str(path)!r} cannot be read: {error.strerror}"]
        ) from None


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


Tokenizer = ByteTokenizer | HuggingFaceTokenizer


def loss_unit(tokenizer: Tokenizer) -> tuple[str, int]:
    """The unit that a loss is divided by, and the number of tokens a uniform guess chooses from."""
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
    if not (place / "tokenizer.json").is_file():
        problem = "holds no tokenizer.json" if place.is_dir() else "is no folder"
        raise ConfigError(
            [
                f"model.tokenizer_path={path!r} {problem} (left out, it is model.hf_assets_path): "
                "use 'bytes', or download tokenizer.json and tokenizer_config.json of a Hugging "
                "Face model to a folder of that name (`hf download MODEL tokenizer.json "
                "tokenizer_config.json --local-dir FOLDER`)"
            ]
        )
    return HuggingFaceTokenizer(place)
