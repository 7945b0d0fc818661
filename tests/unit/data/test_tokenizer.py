import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_moe.config.errors import ConfigError
from titan_moe.data.tokenizer import ByteTokenizer, load_tokenizer

TEXT = "def f(x):\n    return 'naïve — 12345' # <|end_of_text|>\n"


@given(st.text())
def test_bytes_give_the_text_back(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]) == text


def token(content, special=True):
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": not special}
    return {"content": content, "special": special, **flags}


def write_folder(folder, config):
    import tokenizers

    symbols = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={name: n for n, name in enumerate(symbols)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<|end_of_text|>", "<|eos|>"])
    tokenizer.add_tokens(["<tool>"])
    tokenizer.enable_truncation(4)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, table in config.items():
        (folder / name).write_text(json.dumps(table))
    return str(folder)


_DECODER = {"257": token("<|end_of_text|>"), "259": token("<tool>", special=False)}
# The places that name a folder's EOS and BOS.
SPECIAL_TOKENS = {
    "table": {
        "tokenizer_config.json": {
            "eos_token": token("<|eos|>") | {"__type": "AddedToken"},
            "bos_token": "<s>",
        }
    },
    "added_tokens_decoder": {
        "tokenizer_config.json": {"added_tokens_decoder": _DECODER, "eos_token": "<|eos|>"},
        "special_tokens_map.json": {"eos_token": "<|end_of_text|>"},
    },
    "special_tokens_map without a decoder": {
        "tokenizer_config.json": {"eos_token": "<|end_of_text|>", "bos_token": "<s>"},
        "special_tokens_map.json": {"eos_token": token("<|eos|>")},
        "added_tokens.json": {"<tool>": 259},
    },
}


@pytest.mark.parametrize("case", SPECIAL_TOKENS)
def test_huggingface_folder_is_read_as_transformers_reads_it(tmp_path, case):
    from transformers import AutoTokenizer

    config = {name: dict(table) for name, table in SPECIAL_TOKENS[case].items()}
    config["tokenizer_config.json"]["tokenizer_class"] = "PreTrainedTokenizerFast"
    folder = write_folder(tmp_path / "tok", config)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert (ours.eos_id, ours.bos_id) == (theirs.eos_token_id, theirs.bos_token_id)
    assert ours.vocab_size == len(theirs) == 260
    text = "a <tool> call"
    assert ours.encode(text).tolist() == theirs.encode(text, add_special_tokens=False)
    ids = [*range(ours.vocab_size)]
    assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    # Whole: the file's truncation to 4 tokens does not hold here. A name of EOS in a text is text.
    ids = ours.encode(TEXT).tolist()
    assert ours.decode(ids) == TEXT and not {257, 258} & set(ids)


_EOS = {"eos_token": "<s>"}


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({}, "names no eos_token"),
        ({"tokenizer_config.json": {"eos_token": "<none>"}}, "names no eos_token"),
        (
            {"tokenizer_config.json": _EOS | {"added_tokens_decoder": {"300": token("<x>")}}},
            "tokenizer.json lacks '<x>'.*save the tokenizer with transformers",
        ),
        ({"tokenizer_config.json": _EOS, "added_tokens.json": {"<x>": 300}}, "lacks '<x>'"),
    ],
)
def test_special_tokens_that_tokenizer_json_lacks_are_refused(tmp_path, config, line):
    with pytest.raises(ConfigError, match=line) as error:
        load_tokenizer(write_folder(tmp_path / "tok", config))
    assert len(error.value.lines) == 1


def test_missing_tokenizer_is_refused_with_the_files_to_download(tmp_path):
    with pytest.raises(ConfigError, match=r"is no folder.*download tokenizer.json"):
        load_tokenizer(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"holds no tokenizer.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer.json is not readable"):
        load_tokenizer(str(tmp_path))
