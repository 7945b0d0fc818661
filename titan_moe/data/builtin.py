"""Corpora that every machine has: the Python standard library's sources, and a made-up language."""

import ast
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from titan_moe.config.errors import ConfigError
from titan_moe.data.conversations import conversation_text
from titan_moe.data.order import Corpus, Document, digest, mix

# Not the library itself: installed packages, caches, and tests (mostly tables of input and output).
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class StdlibCorpus(Corpus):
    """Every .py file of the standard library in the order of the paths; 13 MB, held in memory."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` None: the interpreter's standard library. ConfigError when it has no file."""
        folder = folder or Path(sysconfig.get_path("stdlib"))
        hashed: list[bytes] = []
        self._documents: list[Document] = []
        for path in _python_files(folder):
            content = path.read_bytes()
            try:
                text = content.decode()
            except UnicodeDecodeError:  # A few files are in other encodings.
                continue
            name = path.relative_to(folder).as_posix()
            self._documents.append(Document(f"stdlib/{name}", text))
            hashed += f"{name}\0{len(content)}\0".encode(), content
        if not self._documents:
            raise ConfigError(
                f"training.dataset='stdlib': {folder} holds no .py file (a stripped Python?): "
                "use 'synthetic', or 'text' with dataset_path"
            )
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        self.fingerprint = f"stdlib:{version}:{digest(b''.join(hashed))}"

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> Document:
        return self._documents[index]


class StdlibConversations(StdlibCorpus):
    """A question about each function and class of the standard library that has a docstring; the
    answer is its first line."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` and ConfigError: as of `StdlibCorpus`."""
        super().__init__(folder)
        self.fingerprint += ":messages"
        self._documents = [
            Document(f"{source.name}:{number}", conversation_text({"messages": messages}))
            for source in self._documents
            for number, messages in _questions(source)
        ]


def _questions(source: Document) -> Iterator[tuple[int, list[dict[str, str]]]]:
    """Yield line and messages about each definition of a Python file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of old escapes in strings.
        nodes = ast.walk(ast.parse(str(source.content)))
    module = source.name.removeprefix("stdlib/").removesuffix(".py").replace("/", ".")
    for node in nodes:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if said := (ast.get_docstring(node) or "").strip():
            question = f"What is {node.name} of {module}?"
            answer = {"role": "assistant", "content": said.splitlines()[0]}
            yield node.lineno, [{"role": "user", "content": question}, answer]


def _python_files(folder: Path) -> list[Path]:
    files: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        files += [Path(place, name) for name in names if name.endswith(".py")]
    return sorted(files, key=lambda path: path.relative_to(folder).parts)


_NUM_WORDS = 256
_NUM_SUCCESSORS = 4
_ONSETS = ["b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "sh", "tr"]
_VOWELS = ["a", "e", "i", "o", "u", "ai", "ou", "ea"]


class SyntheticCorpus(Corpus):
    """A made-up language, the same bits on every platform.

    A Markov chain over 256 made-up words, each with four successors of falling likelihood.

    Document `i` is a function of (seed, i) alone. There is structure at three ranges: the spelling
    of words, the chain from word to word, and a document's key word, which opens all its sentences.
    """

    def __init__(self, seed: int, *, num_documents: int = 1_000_000) -> None:
        self.fingerprint = f"synthetic:1:seed={seed}:documents={num_documents}"
        self._seed = seed
        self._num_documents = num_documents
        self._words = [_spell(number) for number in range(_NUM_WORDS)]
        self._successors = [
            [mix(seed, word, choice) % _NUM_WORDS for choice in range(_NUM_SUCCESSORS)]
            for word in range(_NUM_WORDS)
        ]

    def __len__(self) -> int:
        return self._num_documents

    def __getitem__(self, index: int) -> Document:
        draw = mix(self._seed, _NUM_WORDS, index)
        key_word, num_sentences = draw % _NUM_WORDS, 4 + (draw >> 8) % 29
        sentences = [self._sentence(index, number, key_word) for number in range(num_sentences)]
        return Document(f"synthetic/{index}", " ".join(sentences) + "\n")

    def _sentence(self, index: int, number: int, key_word: int) -> str:
        bits = mix(self._seed, index, number)
        length, bits = 4 + bits % 8, bits >> 3
        word, words = key_word, [self._words[key_word]]
        for _ in range(length):
            # Four bits choose among the successors with odds 8 : 4 : 2 : 2.
            word = self._successors[word][
                (0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3)[bits & 15]
            ]
            bits >>= 4
            words.append(self._words[word])
        return " ".join(words).capitalize() + "."


def _spell(number: int) -> str:
    """The word of a number below 256: two syllables of 16 onsets and 8 vowels, all different."""
    first, second = divmod(number, 16)
    return _ONSETS[first] + _VOWELS[number % 8] + _ONSETS[second] + _VOWELS[(first + second) % 8]
