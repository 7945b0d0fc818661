import json
import os
import subprocess
import time

import numpy as np
import pytest

from tests.support.commands import TITAN_MOE, run_command
from tests.support.disk_order import watched_disk
from tests.support.documents import ListCorpus, random_texts, write_bpe, write_jsonl
from titan_moe.config.errors import ConfigError
from titan_moe.data import tokenize
from titan_moe.data.hub import HubStream
from titan_moe.data.tokenize import tokenize_corpus
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.data.tokens import TokenCorpus, damaged_files
from titan_moe.runtime.errors import RunError

TOKENIZER = load_tokenizer("bytes")
TEXTS = random_texts(1500)


def write(source, out, **options):
    def ignore(documents, tokens):
        pass

    options = {"progress": ignore, "shard_tokens": 20_000, "workers": 2} | options
    return tokenize_corpus(source, TOKENIZER, out, **options)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_copy_holds_every_document(tmp_path):
    seen = []
    out = tmp_path / "out"
    manifest, _ = write(ListCorpus(TEXTS), out, progress=lambda d, t: seen.append((d, t)))
    corpus = TokenCorpus(tmp_path / "out", tokenizer="bytes")
    assert len(manifest.shards) > 3 and len(corpus) == manifest.documents == len(TEXTS)
    texts = [TOKENIZER.decode(corpus[index].content) for index in range(len(TEXTS))]
    assert texts == TEXTS
    assert sum(d for d, _ in seen) == len(TEXTS) and sum(t for _, t in seen) == manifest.tokens
    assert damaged_files(tmp_path / "out") == []
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".tokens", ".ends", ".json"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_copy_is_on_disk_when_it_gets_its_name(tmp_path):
    with watched_disk() as disk:
        write(ListCorpus(TEXTS), tmp_path / "out")
    assert disk.renamed[-1] == "out" and disk.lost == disk.lost_names() == []


def test_wide_vocabularies_take_four_bytes(tmp_path):
    path = write_bpe(tmp_path / "bpe", merges=[b"%06d" % number for number in range(66_000)])
    tokenizer = load_tokenizer(path)
    text = "x 065999"
    tokenize_corpus(ListCorpus([text]), tokenizer, tmp_path / "out", progress=lambda d, t: None)
    corpus = TokenCorpus(tmp_path / "out", tokenizer=tokenizer.fingerprint)
    assert corpus[0].content.dtype == np.uint32
    assert tokenizer.decode(corpus[0].content) == text


class Killed(BaseException):
    pass


def stop_after(calls):
    remaining = iter(range(calls))

    def progress(documents, tokens):
        if next(remaining, None) is None:
            raise Killed

    return progress


@pytest.mark.parametrize("kind", ["corpus", "stream"])
def test_a_resumed_copy_equals_an_undisturbed_one(tmp_path, kind):
    write_jsonl(tmp_path / "hub" / "a.json", TEXTS[:800])
    write_jsonl(tmp_path / "hub" / "b.json", TEXTS[800:])

    def source():
        if kind == "corpus":
            return ListCorpus(TEXTS)
        return HubStream("c4", str(tmp_path / "hub"), key="--")

    write(source(), tmp_path / "whole")
    for calls in (1, 3, 4, 5):
        with pytest.raises(Killed):
            write(source(), tmp_path / "out", progress=stop_after(calls))
        assert not (tmp_path / "out").exists()
    write(source(), tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_killed_before_the_renaming(tmp_path, monkeypatch):
    write(ListCorpus(TEXTS), tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(tokenize.os, "rename", stop_after(0))
        with pytest.raises(Killed):
            write(ListCorpus(TEXTS), tmp_path / "out")
    with pytest.raises(RunError, match="was begun with source='list', not 'other'"):
        write(ListCorpus(TEXTS, "other"), tmp_path / "out")
    write(ListCorpus(TEXTS), tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_the_command_survives_sigkill(tmp_path):
    command = [*TITAN_MOE, "tokenize", "--out"]
    out, partial = tmp_path / "out", tmp_path / "out.partial" / "shard-00000.tokens"
    process = subprocess.Popen([*command, str(out)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not partial.exists() and time.monotonic() < deadline:
        time.sleep(0.0005)
    process.kill()
    process.wait()
    assert partial.exists() and not out.exists()
    for folder in (out, tmp_path / "whole"):
        subprocess.run([*command, str(folder)], check=True, capture_output=True)
    assert contents(out) == contents(tmp_path / "whole")
    assert json.loads((out / "manifest.json").read_text())["tokenizer"] == "bytes"


def test_nothing_is_overwritten_and_nothing_mixed(tmp_path):
    write(ListCorpus(TEXTS), tmp_path / "out")
    with pytest.raises(RunError, match="exists already"):
        write(ListCorpus(TEXTS), tmp_path / "out")
    with pytest.raises(Killed):
        write(ListCorpus(TEXTS), tmp_path / "other", progress=stop_after(3))
    with pytest.raises(RunError, match=r"other.partial' was begun with source='list', not 'new'"):
        write(ListCorpus(TEXTS, "new"), tmp_path / "other")
    with pytest.raises(RunError, match="has no document"):
        write(ListCorpus([]), tmp_path / "empty")


def test_damage_is_found(tmp_path):
    out = tmp_path / "out"
    write(ListCorpus(TEXTS), out)
    tokens = out / "shard-00001.tokens"
    content = bytearray(tokens.read_bytes())
    content[100] ^= 1
    tokens.write_bytes(content)
    assert damaged_files(out) == ["shard-00001.tokens"]
    run = run_command("tokenize", "--verify", out)
    assert run.returncode == 1 and "wrong checksum of shard-00001.tokens" in run.stderr
    tokens.write_bytes(content[:-2])
    with pytest.raises(
        ConfigError, match=r"shard-00001.tokens has [\d,]+ bytes, not the [\d,]+ of"
    ):
        TokenCorpus(out, tokenizer="bytes")
    with pytest.raises(ConfigError, match=r"made with tokenizer bytes, but .* is tiktoken:1"):
        TokenCorpus(out, tokenizer="tiktoken:1")


@pytest.mark.parametrize("kind", ["tokens", "ends"])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_file_that_is_cut_short_while_a_run_reads_is_no_other_data(tmp_path, kind, is_open):
    """Memory behind the end of a file reads as zeros, up to the end of the page."""
    write(ListCorpus(TEXTS), tmp_path / "out")
    corpus = TokenCorpus(tmp_path / "out", tokenizer="bytes")
    if is_open:
        assert TOKENIZER.decode(corpus[0].content) == TEXTS[0]
    path = tmp_path / f"out/shard-00000.{kind}"
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(
        RunError, match=rf"{path} has [\d,]+ bytes, not the [\d,]+ of the manifest: "
    ):
        corpus[0]
    assert TOKENIZER.decode(corpus[len(TEXTS) - 1].content) == TEXTS[-1]


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": "other"}', '{"format": "titan_moe tokens 1"}']
)
def test_foreign_manifest(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ConfigError, match=r"manifest.json is not one of ours") as error:
        TokenCorpus(tmp_path, tokenizer="bytes")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [None, "3", -1, 2.5, True, [], {}])
def test_a_manifest_s_values_are_checked(tmp_path, value):
    out = tmp_path / "tokens"
    write(ListCorpus(TEXTS), out)
    manifest = json.loads((out / "manifest.json").read_text())
    places = [
        *((manifest, key) for key in manifest),
        *((s, k) for s in manifest["shards"] for k in s),
    ]
    for table, key in places:
        right = table[key]
        if key != "dtype" and type(value) is type(right) and value != -1:
            continue  # It may be so: another text, or no shards.
        table[key] = value
        (out / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(ConfigError, match=r"manifest.json is not one of ours|not the") as error:
            TokenCorpus(out, tokenizer="bytes")
        assert "\n" not in str(error.value)
        table[key] = right
