"""Folders of tiktoken's files give tiktoken's own ids, with the published split patterns."""

import base64
import json
import random
import re

import pytest
import tiktoken
import tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.support.refusals import refusal
from titan_moe.config.job_config import Training
from titan_moe.data.tokenizer import load_tokenizer

WORD = r"[^\r\n\p{L}\p{N}]?"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = [r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"]
KIMI = "|".join(
    [
        r"[\p{Han}]+",
        WORD + UPPER + "*" + LOWER + "+" + ENDING + "?",
        WORD + UPPER + "+" + LOWER + "*" + ENDING + "?",
        *REST,
    ]
)
LLAMA3 = "|".join([ENDING, WORD + r"\p{L}+", *REST])
TEXT = """The model's layers aren't 12,345.678 wide; HTTPServer CamelCase don'T we'LL
def forward(self, x_TD: Tensor) -> Tensor:\r\n\tif x != 0x1F:   return x[1:-1] ** 2  # ok?!
北京是中国的首都。我们去学校Python学习2026年。 こんにちは世界、カタカナ abc한국어 텍스트 123
Добрый день! Größe naïve café e\u0301te\u0301 Ελλάδα ไทย हिन्दी العربية ǅ ʰ
🎉👩‍👩‍👧‍👦🇩🇪 ½ ² ٣٤٥    \n\n   \u3000\u00a0 end"""


def _trained_ranks() -> dict[bytes, int]:
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=sorted(alphabet), show_progress=False
    )
    trained.train_from_iterator([TEXT] * 9, trainer)
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    vocab = trained.get_vocab().items()
    return {bytes(letters[letter] for letter in token): rank for token, rank in vocab}


RANKS = _trained_ranks()
COUNT = len(RANKS)
SPECIAL = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>")


def lines_of(ranks):
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


def write_kimi(folder, ranks=RANKS, **config):
    (folder / "tiktoken.model").write_bytes(lines_of(ranks))
    decoder = {len(ranks) + n: {"content": name, "special": True} for n, name in enumerate(SPECIAL)}
    decoder[len(ranks) + 255] = {"content": "[PAD]", "special": True}
    table = {
        "added_tokens_decoder": decoder,
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "tokenizer_class": "TikTokenTokenizer",
        **{"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(table | config))
    return str(folder)


def write_tekken(path):
    tokens = sorted(RANKS, key=RANKS.__getitem__)
    vocab = [{"rank": n, "token_bytes": base64.b64encode(t).decode()} for n, t in enumerate(tokens)]
    table = {
        "config": {"pattern": KIMI, "default_num_special_tokens": 20}
        | {"default_vocab_size": COUNT + 20 - 5},  # The file has five more.
        "vocab": vocab,
        "special_tokens": [
            {"rank": n, "token_str": name} for n, name in enumerate(("<unk>", "<s>", "</s>"))
        ],
    }
    path.write_text(json.dumps(table))


def drawn_texts(count):
    draw = random.Random(0)
    for number in range(count):
        first, length = draw.randrange(len(TEXT)), draw.randrange(1, 90)
        yield TEXT[first : first + length] if number % 2 else "".join(draw.choices(TEXT, k=length))


def assert_same(tokenizer, pattern, *, shift=0, ranks=RANKS):
    theirs = tiktoken.Encoding(
        "theirs", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"[EOS]": 9_999}
    )
    for text in [TEXT, *drawn_texts(1000), "[EOS] <|im_end|>"]:
        ids = tokenizer.encode(text).tolist()
        assert [token - shift for token in ids] == theirs.encode_ordinary(text)
        assert tokenizer.decode(ids) == text


def test_kimi_folder_gives_tiktokens_ids(tmp_path):
    tokenizer = load_tokenizer(write_kimi(tmp_path))
    assert_same(tokenizer, KIMI)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (COUNT, COUNT + 1)
    assert tokenizer.vocab_size == COUNT + 256
    reserved = [COUNT + 2, COUNT + 100, COUNT + 255]
    assert tokenizer.decode(reserved) == f"<|im_end|><|reserved_token_{COUNT + 100}|>[PAD]"
    instruct = load_tokenizer(write_kimi(tmp_path, eos_token={"content": "<|im_end|>"}))
    assert (instruct.append_eos, instruct.stop_ids) == ("[EOS]", {COUNT + 1, COUNT + 2})


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json", "llama.tiktoken"])
def test_llama3_ranks_are_known_by_their_content(tmp_path, name):
    (tmp_path / name).write_bytes(lines_of(RANKS).replace(b"\n", b"\r\n") + b"\n")
    for path in (tmp_path, tmp_path / name):
        tokenizer = load_tokenizer(str(path))
        assert_same(tokenizer, LLAMA3)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (COUNT, COUNT + 1)
    assert tokenizer.decode([COUNT + 7, COUNT + 9]) == "<|end_header_id|><|eot_id|>"
    assert tokenizer.decode([COUNT + 255]) == "<|reserved_special_token_250|>"


@pytest.mark.parametrize("name", ["tekken.json", "tokenizer.json"])
def test_tekken_file_gives_tiktokens_ids_after_the_special_tokens(tmp_path, name):
    write_tekken(tmp_path / name)
    tokenizer = load_tokenizer(str(tmp_path))
    kept = {token: rank for token, rank in RANKS.items() if rank < COUNT - 5}
    assert_same(tokenizer, KIMI, shift=20, ranks=kept)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, COUNT + 15)
    assert tokenizer.decode([2, 19]) == "</s><SPECIAL_19>"


def test_special_tokens_inside_texts_are_parsed_by_key(tmp_path):
    tokenizer = load_tokenizer(write_kimi(tmp_path), Training(parse_special_tokens=True))
    ids = tokenizer.encode(f"a[EOS]b<|reserved_token_{COUNT + 5}|>").tolist()
    assert ids == [RANKS[b"a"], COUNT + 1, RANKS[b"b"], COUNT + 5]


def test_characters_that_tokens_split_are_decoded_whole(tmp_path):
    tokenizer = load_tokenizer(write_kimi(tmp_path, {bytes([byte]): byte for byte in range(256)}))
    text = "né 🎉 京"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(iter(ids)) == text
    assert tokenizer.decode(ids[:5]) == "né �"


def test_a_million_blanks_do_not_end_the_process(tmp_path):
    tokenizer = load_tokenizer(write_kimi(tmp_path))
    ids = tokenizer.encode("a" + 1_000_000 * " " + "b")
    assert tokenizer.decode(ids) == "a" + 1_000_000 * " " + "b"


TOO_MANY = RANKS | {b"x%06d" % n: COUNT + n for n in range(130_000)}


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (lines_of(RANKS) + b"damaged\n", f"line {COUNT + 1} is not a base64 token and its rank"),
        (lines_of({t: rank + 1 for t, rank in RANKS.items()}), "do not count from 0"),
        (lines_of({b"a": 0, b"b": 1}), "254 of the 256 bytes have no rank"),
        (lines_of(TOO_MANY), r"130,\d+ ranks are not Llama 3's.*split pattern is not known"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is no JSON object, .*git lfs pull"),
        (b'{"config": {}, "vocab": [{"token_bytes": "YQ=="}]}', "names no special_tokens"),
    ],
)
def test_file_that_is_not_understood_is_refused_in_one_line(tmp_path, content, line):
    (tmp_path / "tokenizer.model").write_bytes(content)
    said = refusal(load_tokenizer, str(tmp_path))
    assert re.search(f"tokenizer.model .*{line}", said) and "\n" not in said
