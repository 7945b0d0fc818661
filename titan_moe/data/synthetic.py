"""A made-up language: small, seeded, learnable, and the same bits on every platform."""

from titan_moe.data.documents import Document, mix

_NUM_WORDS = 256
_NUM_SUCCESSORS = 4
_ONSETS = ["b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "sh", "tr"]
_VOWELS = ["a", "e", "i", "o", "u", "ai", "ou", "ea"]


class SyntheticCorpus:
    """A Markov chain over 256 made-up words, each with four successors of falling likelihood.

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
