"""Text to token ids and back, and the tokens that a document begins and ends with."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ValidationError

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Training
from titan_moe.data.conversations import ChatError
from titan_moe.data.encodings import (
    ByteEncoding,
    HuggingFaceEncoding,
    SentencePieceEncoding,
    TiktokenEncoding,
    read_tiktoken,
)
from titan_moe.data.order import digest
from titan_moe.models.hf_settings import TextFormat, chat_templates, text_of

if TYPE_CHECKING:
    from titan_moe.data.chat import Conversations

_BESIDE = ("tokenizer_config", "special_tokens_map", "added_tokens", "generation_config", "config")
_PATTERNS = ("tokenizer.json", "*.model", "*tekken*.json", "*.tiktoken", "*.model.v*")
# An instruct tokenizer's EOS may end a turn of a chat. Its base model's texts end with another
# token, the first of these that the tokenizer has.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eot|>", "<|return|>", "<|end_of_msg|>")
_TEXT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "[EOS]", "</s>")


_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


Encoding = ByteEncoding | HuggingFaceEncoding | SentencePieceEncoding | TiktokenEncoding


class Tokenizer:
    """An encoding, and the tokens around each document as the keys of a configuration say."""

    def __init__(
        self, path: str, encoding: Encoding, fingerprint: str, names: _Names, training: Training
    ) -> None:
        """ConfigError if there is no EOS, or if a key names a token that there is not."""
        self.path = path
        self._encoding = encoding
        # With one fingerprint, texts have the same ids, if parse_special_tokens agrees.
        self.fingerprint = fingerprint
        self.vocab_size = encoding.vocab_size
        self.parse_special_tokens = training.parse_special_tokens
        bos = names.special.get("bos_token") or encoding.ends[0]
        eos = names.special.get("eos_token") or encoding.ends[1]
        key = training.append_eos
        self.bos_id = encoding.id_of(bos)
        self.pad_id = encoding.id_of(names.special.get("pad_token", ""))
        # The token that ends a document, or False.
        self.append_eos: str | bool = key if key is not True else self._text_end(eos)
        adds_bos = self.bos_id in encoding.added[:1] if names.adds_bos is None else names.adds_bos
        by_default = bool(adds_bos) and self.bos_id is not None
        self.prepend_bos = by_default if training.prepend_bos is None else training.prepend_bos
        if self.prepend_bos and self.bos_id is None:
            raise _error(path, "has no bos_token: leave training.prepend_bos out")
        last = None if self.append_eos is False else encoding.id_of(str(self.append_eos))
        if isinstance(key, str) and last is None:
            raise _error(path, f"has no token {key!r}: name another with training.append_eos")
        eos_id = encoding.id_of(eos) if last is None else last
        if eos_id is None:
            raise _error(
                path,
                "names no eos_token that is understood: download the tokenizer_config.json and "
                "special_tokens_map.json of the same model, or set training.append_eos to its name",
            )
        self.eos_id = eos_id  # Also pads.
        self._before = np.array([self.bos_id] if self.prepend_bos else [], np.int64)
        self._after = np.array([] if last is None else [last], np.int64)
        # Tokens that end a text which a model generates.
        self.stop_ids = {eos_id, *names.stops, encoding.id_of(eos)}
        self.conversations: Conversations | None = None
        """Reads documents of training.dataset_format = "messages"; None for those of texts."""
        if training.dataset_format == "messages":
            self.conversations = self._read_conversations(names, training)
            ends = [encoding.id_of(name) for name in _TURN_ENDS]
            self.stop_ids |= {end for end in ends if end is not None}
            self.stop_ids |= {*self.conversations.turn_ends()}

    def _read_conversations(self, names: _Names, training: Training) -> Conversations:
        # Here: a run without conversations needs no template engine.
        from titan_moe.data.chat import Conversations
        from titan_moe.data.chat_template import CHATML_TOKENS, ChatTemplate, chatml

        how, encoding = training.messages, self._encoding
        if isinstance(encoding, SentencePieceEncoding):
            problem = "has no tokenizer.json, which tells special tokens from text: add it"
            raise _error(self.path, problem)
        is_bare = isinstance(encoding, ByteEncoding) and not names.templates
        named = how.template or ("chatml" if is_bare else None)
        place = f"training.messages.template={named!r}"
        sources = {} if named else names.templates
        source = sources.get("default")
        if named is None:
            place = f"model.tokenizer_path={self.path!r}"
        elif named == "chatml":
            turn = encoding.ends if isinstance(encoding, ByteEncoding) else CHATML_TOKENS
            if not {*turn} <= encoding.special.keys():
                line = f"{place} needs the tokens {' and '.join(turn)}, which {self.path!r} lacks"
                raise ConfigError(f"{line}: name a file of the template that its model has")
            source = chatml(*turn)
        else:
            source = _read(Path(named), "training.messages.template").decode(errors="replace")
        if not source:
            problem = "has no chat_template: name one with training.messages.template"
            raise _error(self.path, f"{problem}, a file in Jinja or 'chatml'")
        day = None if how.date is None else datetime.date.fromisoformat(how.date)
        special, options = set(encoding.special), how.template_kwargs
        try:
            plain, with_tools = (
                ChatTemplate(each, names.special, special=special, date=day, options=options)
                for each in (source, sources.get("tool_use", source))
            )
        except ChatError as error:
            raise ConfigError(f"{place}: {error}") from None
        around = self._before, self._after
        return Conversations(plain, with_tools, encoding.encode_spans, around, how)

    def _text_end(self, eos: str) -> str:
        if eos not in _TURN_ENDS:
            return eos
        return next((n for n in _TEXT_ENDS if self._encoding.id_of(n) is not None), eos)

    def text_format(self, before: TextFormat = TextFormat()) -> TextFormat:  # noqa: B008
        """The format of texts of a model that trains on this tokenizer's documents.

        Args:
            before: of the checkpoint that the run begins with. A run on texts leaves its chat
                template to the model, if the tokenizer has its tokens.
        """
        ids = {"bos": self.bos_id, "eos": self.eos_id, "pad": self.pad_id}
        ends = {f"{name}_token_id": number for name, number in ids.items() if number is not None}
        special = self._encoding.special
        if self.conversations is None:
            is_same = before.turn_ends.items() <= special.items()
            return replace(before if is_same else TextFormat(), ends=ends)
        names = {number: name for name, number in special.items()}
        turn_ends = {names[number]: number for number in self.conversations.turn_ends()}
        return TextFormat(ends, self.conversations.template.source, turn_ends)

    def identity(self) -> dict[str, Any]:
        """Everything that ids of documents depend on, by the fields of `sequences.Identity`."""
        return {
            "tokenizer": self.fingerprint,
            "tokenizer_path": self.path,
            "append_eos": self.append_eos,
            "prepend_bos": self.prepend_bos,
            "parse_special_tokens": self.parse_special_tokens,
            "messages": "" if self.conversations is None else self.conversations.identity,
        }

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, without those around a document. Names of special tokens are text, unless
        `training.parse_special_tokens` is set."""
        return self._encoding.encode(text)

    def decode(self, ids: Iterable[Any]) -> str:
        """Text of `ids`, whole numbers; broken UTF-8 becomes U+FFFD."""
        return self._encoding.decode([int(token) for token in ids])

    def pieces(self, ids: Iterable[Any]) -> tuple[list[bytes], list[bool]]:
        """The bytes that each of `ids` stands for, and whether each is a special token."""
        special = {number: name.encode() for name, number in self._encoding.special.items()}
        numbers = [int(token) for token in ids]
        contents = [special.get(token) or self._encoding.bytes_of(token) for token in numbers]
        return contents, [token in special for token in numbers]

    def document(self, ids: np.ndarray) -> np.ndarray:
        """Returns int64 ids of a document, with the tokens that begin and end it."""
        return np.concatenate([self._before, ids.astype(np.int64), self._after])


class _Token(BaseModel):
    content: str


class _File(BaseModel):
    """The kinds of the values that are read of the files beside a tokenizer."""

    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    pad_token: str | _Token | None = None
    add_bos_token: bool | None = None
    added_tokens_decoder: dict[int, _Token] | None = None
    eos_token_id: int | list[int] | None = None
    text_config: _File | None = None


class _Names:
    """The special tokens that the files beside a tokenizer name, by transformers' rules.

    added_tokens_decoder in tokenizer_config.json is the newer form, and goes before
    special_tokens_map.json and added_tokens.json.
    """

    def __init__(self, folder: Path | None, template: str | None) -> None:
        """ValueError with file and key if a value is of another kind than transformers writes.
        template: a chat template in place of the folder's, if it is another one."""
        self.config, mapped, added, generation, model = (
            _read_json(folder / f"{name}.json") if folder is not None else {} for name in _BESIDE
        )
        decoder = self.config.get("added_tokens_decoder")
        table = mapped | self.config if decoder is not None else self.config | mapped
        self.added = list(added) if decoder is None else [_content(t) for t in decoder.values()]
        self.special = {name: _content(table[name]) for name in _SPECIAL if table.get(name)}
        self.templates = chat_templates(folder, self.config.get("chat_template"))
        if template not in (None, self.templates.get("default")):
            self.templates = {"default": template}
        self.adds_bos: bool | None = self.config.get("add_bos_token")
        ends = [each.get("eos_token_id") for each in (generation, text_of(model), model)]
        stops: Any = next((end for end in ends if end is not None), [])
        self.stops: list[int] = stops if isinstance(stops, list) else [stops]


def _content(token: str | dict[str, str]) -> str:
    return token if isinstance(token, str) else token["content"]


def _read_json(path: Path) -> dict[str, Any]:
    content = _read(path).removeprefix(b"\xef\xbb\xbf") if path.is_file() else b"{}"
    try:
        _File.model_validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"][:1]))
        raise ValueError(f"{path.name}: {key}: {first['msg']}".replace(": : ", ": ")) from None
    return json.loads(content)


def _read(path: Path, key: str = "model.tokenizer_path") -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: {str(path)!r} cannot be read: {error.strerror}") from None


def _error(path: str, problem: str) -> ConfigError:
    return ConfigError(f"model.tokenizer_path={path!r} {problem}".replace(" : ", ": "))


def loss_unit(tokenizer: Tokenizer) -> tuple[str, int]:
    """The unit that a loss is divided by, and the number of tokens a uniform guess chooses from."""
    return ("byte", 256) if tokenizer.path == "bytes" else ("token", tokenizer.vocab_size)


def load_tokenizer(
    path: str, training: Training | None = None, template: str | None = None
) -> Tokenizer:
    """Load `model.tokenizer_path` for documents as `training` says (None: as by default).

    The format follows from a file's content. `template`: a chat template in Jinja, which stands for
    the tokenizer's own. Raises ConfigError if there is no tokenizer.
    """
    training = training or Training()
    if path == "bytes":
        return Tokenizer(path, ByteEncoding(), "bytes", _Names(None, template), training)
    files = _files(path)
    try:
        names = _Names(files[0].parent, template)
    except ValueError as error:
        raise _error(path, f": {error}: download the file again") from None
    for file in files:
        content = _read(file)
        try:
            # A template's special tokens are to be read.
            parse = training.parse_special_tokens or training.dataset_format == "messages"
            encoding = _encoding(content, names.config, parse)
        except ImportError as error:
            package = error.name
            raise _error(path, f"needs the package {package}: pip install {package}") from None
        except Exception as error:  # `tokenizers` raises bare Exception.
            line = (str(error).splitlines() or [type(error).__name__])[0]
            raise _error(path, f": {file.name} is not readable: {line}") from None
        if encoding is not None:
            missing = [name for name in names.added if encoding.id_of(name) is None]
            if missing and not isinstance(encoding, TiktokenEncoding):
                raise _error(
                    path,
                    f": {file.name} lacks {missing[0]!r}, which the files beside it add: load and "
                    "save the tokenizer with transformers, which writes all tokens to "
                    "tokenizer.json",
                )
            return Tokenizer(path, encoding, digest(content), names, training)
    raise _error(
        path,
        f": {files[0].name} is no JSON object, no lines of base64 and ranks and no sentencepiece "
        "model: download it again (with Git: git lfs pull)",
    )


def _files(path: str) -> list[Path]:
    """The file, or files of a folder, that may be a tokenizer."""
    place = Path(path)
    if place.is_file():
        return [place]
    files = [file for pattern in _PATTERNS for file in sorted(place.glob(pattern))]
    if found := [file for file in files if file.is_file()]:
        return found
    names = "tokenizer.json, tiktoken.model, tokenizer.model, tekken.json"
    problem = f"holds no {names}" if place.is_dir() else "is no folder"
    raise _error(
        path,
        f"{problem} (left out, it is model.hf_assets_path): use 'bytes', or download "
        "tokenizer.json and tokenizer_config.json of a Hugging Face model to a folder of that name "
        "(`hf download MODEL tokenizer.json tokenizer_config.json --local-dir FOLDER`; Kimi's "
        "models have tiktoken.model in place of tokenizer.json)",
    )


def _encoding(content: bytes, config: dict[str, Any], parse: bool) -> Encoding | None:
    """The encoding that a file holds; None if its content is no tokenizer's."""
    if ranks := read_tiktoken(content, config, parse=parse):
        return ranks
    if content.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{":
        import tokenizers

        loaded = tokenizers.Tokenizer.from_str(content.decode("utf-8-sig"))
        return HuggingFaceEncoding(loaded, parse=parse)
    # Sentencepiece's protobuf begins with a message, the first piece, which begins with its text.
    if content[:1] == content[2:3] == b"\n":
        return SentencePieceEncoding(content, parse=parse)
    return None
