import json
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.refusals import config_file, refusal
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Training
from titan_moe.config.parse import load_job
from titan_moe.data.order import Document
from titan_moe.data.sequences import encode_document
from titan_moe.data.tokenizer import load_tokenizer

TEXT = "def f(x):\n    return 'naïve — 12345' # <|end_of_text|>\n"


@given(st.text())
def test_bytes_give_the_text_back(text):
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.decode([tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]) == text


def token(content, special=True):
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": not special}
    return {"content": content, "special": special, **flags}


def write_folder(folder, config, *, specials=("<s>", "<|end_of_text|>", "<|eos|>"), bos=None):
    """bos: tokenizer.json itself puts this token in front of a text."""
    import tokenizers

    symbols = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={name: n for n, name in enumerate(symbols)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    tokenizer.add_tokens(["<tool>"])
    if bos is not None:
        pair = (bos, tokenizer.token_to_id(bos))
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[pair]
        )
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
        # Values of other kinds than transformers writes.
        ({"added_tokens.json": [1]}, ": added_tokens.json: Input should be an object: download"),
        ({"special_tokens_map.json": None}, "special_tokens_map.json: Input should be an object"),
        ({"tokenizer_config.json": {"eos_token": 3}}, "config.json: eos_token: .* valid string"),
        ({"special_tokens_map.json": {"bos_token": {"content": []}}}, "map.json: bos_token: "),
        ({"tokenizer_config.json": {"added_tokens_decoder": [1]}}, "decoder: .* be an object"),
        ({"tokenizer_config.json": _EOS | {"add_bos_token": "no"}}, "add_bos_token: .* boolean"),
        ({"generation_config.json": {"eos_token_id": ["1"]}}, "eos_token_id: .* valid integer"),
        ({"tokenizer.json": []}, "tokenizer.json is no JSON object"),
    ],
)
def test_special_tokens_that_are_lacking_or_not_understood_are_refused(tmp_path, config, line):
    assert re.search(line, refusal(load_tokenizer, write_folder(tmp_path / "tok", config)))


NAMES = ("<s>", "<|endoftext|>", "<|im_end|>", "<tool>")


def document(path, **keys):
    """The decoded document "a", and the tokenizer."""
    tokenizer = load_tokenizer(path, Training(**keys))
    return tokenizer.decode(encode_document(Document("d", "a"), tokenizer).ids), tokenizer


@pytest.mark.parametrize(
    ("eos", "key", "said"),
    [
        ("<|im_end|>", True, "a<|endoftext|>"),  # The base model's: no document ends a turn.
        ("<tool>", True, "a<tool>"),
        ("<|im_end|>", "<|im_end|>", "a<|im_end|>"),
        ("<|im_end|>", "<tool>", "a<tool>"),
        ("<|im_end|>", False, "a"),
    ],
)
def test_append_eos_names_the_token_that_ends_a_document(tmp_path, eos, key, said):
    config = {"tokenizer_config.json": {"eos_token": eos}}
    path = write_folder(tmp_path / "tok", config, specials=NAMES)
    (tmp_path / "tok/generation_config.json").write_text('{"eos_token_id": [256, 5]}')
    text, tokenizer = document(path, append_eos=key)
    assert text == said
    ends = {tokenizer.decode([token]) for token in tokenizer.stop_ids}
    assert ends >= {eos, tokenizer.decode([5]), "<s>", said[1:] or eos}


@pytest.mark.parametrize(
    ("says", "bos", "key", "begins"),
    [
        ({"add_bos_token": True}, None, None, True),
        ({"add_bos_token": False}, "<s>", None, False),
        ({}, "<s>", None, True),  # Llama 3's folder says it in tokenizer.json alone.
        ({}, "<|eos|>", None, False),
        ({}, None, None, False),
        ({"add_bos_token": True}, None, False, False),
        ({}, None, True, True),
        ({"add_bos_token": True, "bos_token": None}, None, None, False),
    ],
)
def test_prepend_bos_is_by_default_as_the_folder_says(tmp_path, says, bos, key, begins):
    config = {"tokenizer_config.json": {"eos_token": "<|eos|>", "bos_token": "<s>"} | says}
    text, _ = document(write_folder(tmp_path / "tok", config, bos=bos), prepend_bos=key)
    assert text == ("<s>" if begins else "") + "a<|eos|>"


def test_special_tokens_inside_documents_are_parsed_by_key(tmp_path):
    config = {"tokenizer_config.json": {"eos_token": "<|im_end|>"}}
    path = write_folder(tmp_path / "tok", config, specials=NAMES)
    parsed = load_tokenizer(path, Training(parse_special_tokens=True))
    ids = parsed.encode("a<|im_end|>").tolist()
    assert len(ids) == 2 and ids[1] in parsed.stop_ids
    assert len(load_tokenizer(path).encode("a<|im_end|>")) == 11


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"append_eos": "<none>"}, "has no token '<none>': name another with training.append_eos"),
        ({"prepend_bos": True}, "has no bos_token: leave training.prepend_bos out"),
    ],
)
def test_key_that_needs_a_token_which_is_not_there_is_refused(tmp_path, keys, line):
    path = write_folder(tmp_path / "tok", {"tokenizer_config.json": {"eos_token": "<s>"}})
    with pytest.raises(ConfigError, match=line):
        load_tokenizer(path, Training(**keys))


def test_append_eos_is_a_flag_or_a_name(tmp_path):
    for text, value in (("false", False), ("true", True), ("<x>", "<x>")):
        assert load_job(["--training.append_eos", text]).training.append_eos == value
    line = refusal(load_job, config_file(tmp_path, "training.append_eos = 3"))
    assert line.endswith("must be true, false or the name of a token")


def test_sentencepiece_model_needs_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0")
    with pytest.raises(ConfigError, match="needs the package sentencepiece: pip install"):
        load_tokenizer(str(tmp_path))


def test_sentencepiece_model_gives_its_own_ids(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT, "Äpfel 北京 🎉"] * 50),
        model_prefix=str(tmp_path / "tokenizer"),
        **{"vocab_size": 310, "model_type": "bpe", "byte_fallback": True, "minloglevel": 2},
        **{"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    )
    theirs = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (theirs.bos_id(), theirs.eos_id())
    for text in (TEXT, "    x = 1", "Äpfel  北京🎉 ß", ""):
        assert tokenizer.encode(text).tolist() == theirs.encode(text)
        assert tokenizer.decode(theirs.encode(text)) == text
        contents, _ = tokenizer.pieces(theirs.encode(text))
        assert b"".join(contents).decode() == (" " + text if text else "")
    ids = encode_document(Document("d", "a"), tokenizer).ids
    assert ids.tolist() == [theirs.bos_id(), *theirs.encode("a"), theirs.eos_id()]


def test_missing_tokenizer_is_refused_with_the_files_to_download(tmp_path):
    with pytest.raises(ConfigError, match=r"is no folder.*download tokenizer.json"):
        load_tokenizer(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"holds no tokenizer.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer.json is not readable"):
        load_tokenizer(str(tmp_path))
