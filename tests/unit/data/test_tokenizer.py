import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.documents import write_bpe
from titan_moe.config.errors import ConfigError
from titan_moe.data.tokenizer import ByteTokenizer, load_tokenizer

TEXT = "def f(x):\n    return 'naïve — 12345' # <|end_of_text|>\n"


@given(st.text())
def test_bytes_are_the_tiktoken_encoding(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text).tolist()
    assert ids == ByteTokenizer.encoding().encode_ordinary(text)
    assert tokenizer.decode(ids) == text


def test_bytes_special_tokens():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.vocab_size == ByteTokenizer.encoding().n_vocab == 259
    assert tokenizer.decode([104, 105, tokenizer.eos_id]) == "hi<|eos|>"


def test_tiktoken_file(tmp_path):
    tokenizer = load_tokenizer(write_bpe(tmp_path / "tokenizer.model"))
    assert tokenizer.vocab_size == 256 + 3 + 256
    assert (tokenizer.bos_id, tokenizer.eos_id) == (259, 260)
    assert tokenizer.decode([268]) == "<|eot_id|>"  # As in Llama 3: the tenth special token.
    ids = tokenizer.encode(TEXT).tolist()
    assert tokenizer.decode(ids) == TEXT
    assert 258 in ids  # "retu"
    assert max(ids) < 259  # A special token's name in a text is text.


def test_tiktoken_file_is_read_anew_after_a_change(tmp_path):
    path = tmp_path / "tokenizer.model"
    before = load_tokenizer(write_bpe(path))
    after = load_tokenizer(write_bpe(path, merges=(b"de",)))
    assert before.fingerprint != after.fingerprint and after.vocab_size == 256 + 1 + 256


def test_tiktoken_file_of_another_model_is_refused(tmp_path):
    """Llama 4's file has 200,000 ranks, Kimi K2's 163,584: other splits, other special tokens."""
    merges = tuple(number.to_bytes(3, "big") for number in range(200_000 - 256))
    path = write_bpe(tmp_path / "tokenizer.model", merges=merges)
    with pytest.raises(ConfigError, match="has 200,000 ranks, not Llama 3's") as caught:
        load_tokenizer(path)
    assert "name the folder of that model's tokenizer.json" in caught.value.lines[0]


def write_folder(folder, config):
    import tokenizers

    model = tokenizers.models.BPE(
        vocab={symbol: number for number, symbol in enumerate(sorted(byte_symbols()))}, merges=[]
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<|end_of_text|>"])
    tokenizer.enable_truncation(4)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, table in config.items():
        (folder / name).write_text(json.dumps(table))
    return str(folder)


def byte_symbols():
    import tokenizers

    return tokenizers.pre_tokenizers.ByteLevel.alphabet()


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_config.json": {"eos_token": "<|end_of_text|>", "bos_token": None}},
        {"tokenizer_config.json": {"eos_token": {"content": "<|end_of_text|>"}}},
        {"special_tokens_map.json": {"eos_token": "<|end_of_text|>"}, "tokenizer_config.json": {}},
    ],
)
def test_huggingface_folder(tmp_path, config):
    tokenizer = load_tokenizer(write_folder(tmp_path / "tok", config))
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == (258, 257, None)
    ids = tokenizer.encode(TEXT).tolist()
    assert tokenizer.decode(ids) == TEXT  # Whole: the file's truncation to 4 tokens is not ours.
    assert 257 not in ids


def token(content, special=True):
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": not special}
    return {"content": content, "special": special, **flags}


# All the places that a folder's special tokens stand in, and tokens that tokenizer.json lacks.
SPECIAL_TOKENS = {
    "added_tokens_decoder": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "259": token("<tool>", special=False),
                "258": token("<|eos|>"),
                "257": token("<|end_of_text|>"),
            },
            "eos_token": "<|eos|>",
            "bos_token": "<s>",
        }
    },
    "the decoder alone counts": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {"300": token("<|eos|>")},
            "eos_token": "<|eos|>",
            "bos_token": "<s>",
        },
        "special_tokens_map.json": {"eos_token": "<|end_of_text|>"},
        "added_tokens.json": {"<tool>": 258},
    },
    "added_tokens.json": {
        "tokenizer_config.json": {"eos_token": "<|eos|>", "bos_token": "<s>"},
        "added_tokens.json": {"<tool>": 259, "<|eos|>": 258},
    },
    "the map goes before": {
        "tokenizer_config.json": {"eos_token": "<|end_of_text|>", "bos_token": "<s>"},
        "special_tokens_map.json": {"eos_token": token("<|eos|>")},
        "added_tokens.json": {"<|eos|>": 258, "<tool>": 259},
    },
    "named and nowhere": {
        "tokenizer_config.json": {"eos_token": "<|eos|>", "bos_token": "<|bos|>"}
    },
}


@pytest.mark.parametrize("case", SPECIAL_TOKENS)
def test_special_tokens_are_read_as_transformers_reads_them(tmp_path, case):
    from transformers import AutoTokenizer

    config = {name: dict(table) for name, table in SPECIAL_TOKENS[case].items()}
    config["tokenizer_config.json"]["tokenizer_class"] = "PreTrainedTokenizerFast"
    folder = write_folder(tmp_path / "tok", config)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert (ours.eos_id, ours.bos_id) == (theirs.eos_token_id, theirs.bos_token_id)
    assert ours.vocab_size == len(theirs)
    text = "a <tool> call"
    assert ours.encode(text).tolist() == theirs.encode(text, add_special_tokens=False)
    ids = [*range(ours.vocab_size)]
    assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    assert ours.eos_id not in ours.encode("<|eos|>")


def test_an_added_token_makes_another_tokenizer(tmp_path):
    plain = {"tokenizer_config.json": {"eos_token": "<|end_of_text|>"}}
    known = {"tokenizer_config.json": {**plain["tokenizer_config.json"]}}
    known["tokenizer_config.json"]["added_tokens_decoder"] = {"257": token("<|end_of_text|>")}
    more = {**plain, "added_tokens.json": {"<tool>": 258}}
    folders = [write_folder(tmp_path / str(n), each) for n, each in enumerate([plain, known, more])]
    first, second, third = (load_tokenizer(folder).fingerprint for folder in folders)
    assert first == second != third


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_config.json": []},
        {"tokenizer_config.json": {"eos_token": 3}},
        {"tokenizer_config.json": {"eos_token": {"content": 3}}},
        {"tokenizer_config.json": {"eos_token": "<s>", "added_tokens_decoder": [1]}},
        {"tokenizer_config.json": {"eos_token": "<s>", "added_tokens_decoder": {"x": "y"}}},
        {"tokenizer_config.json": {"eos_token": "<s>"}, "added_tokens.json": {"<x>": "y"}},
    ],
)
def test_special_tokens_that_are_none(tmp_path, config):
    with pytest.raises(ConfigError, match=r"are not understood|is no table") as error:
        load_tokenizer(write_folder(tmp_path / "tok", config))
    assert len(error.value.lines) == 1


def test_what_is_missing_says_what_to_download(tmp_path):
    with pytest.raises(ConfigError, match=r"does not exist.*download tokenizer.json.*Llama 3"):
        load_tokenizer(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"holds no tokenizer.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"\x80\x02 a sentencepiece model", "line 1 is not a base64 token"),
        (b"YQ== 0\nYg== 1\n", "its 2 ranks do not count"),
        (b"", "its 0 ranks"),
    ],
)
def test_foreign_bpe_file(tmp_path, content, line):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=line) as error:
        load_tokenizer(str(path))
    assert len(error.value.lines) == 1 and "\n" not in error.value.lines[0]


def test_foreign_folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer.json is not readable"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match="names no eos_token"):
        load_tokenizer(write_folder(tmp_path / "tok", {}))


@pytest.mark.parametrize("flag", [None, 1, "x", []])
def test_a_flag_of_an_added_token_is_true_or_false(tmp_path, flag):
    import tokenizers

    model = tokenizers.models.WordLevel({"a": 0, "<eos>": 1}, "a")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    token = {"content": "<x>", "lstrip": flag}
    settings = {"eos_token": "<eos>", "added_tokens_decoder": {"2": token}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="special tokens are not understood"):
        load_tokenizer(str(tmp_path))
