"""A tokenised copy holds every document, is complete or invisible, and shows damage."""

import os
import re
import signal
import subprocess
import time

import pytest

from tests.support.commands import TITAN_MOE, run_command
from tests.support.disk_order import watched_disk
from tests.support.documents import TOKENIZER, random_texts, write_hub, write_jsonl, write_ranks
from tests.support.jobs import until
from tests.support.processes import start_process
from tests.support.refusals import refusal
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Training
from titan_moe.data import tokens
from titan_moe.data.corpus import FileCorpus, Source
from titan_moe.data.stream import HubStream
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.data.tokens import TokenCorpus, damaged_files, write_tokens
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.files import lock_folder
from titan_moe.runtime.process_pool import TIMEOUT_S

TEXTS = [*random_texts(1500), None]


def opened(folder, tokenizer=TOKENIZER):
    return TokenCorpus(Source("training.", "tokens", str(folder)), tokenizer)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def corpus_of(folder, texts=TEXTS):
    path = write_jsonl(folder / "documents.jsonl", texts)
    return FileCorpus(Source("training.", "json", path))


@pytest.mark.parametrize(("kind", "workers"), [("json", 1), ("json", 3), ("hub", 2)])
def test_copy_holds_every_document(tmp_path, monkeypatch, kind, workers):
    monkeypatch.delattr(os, "fork")  # A process with threads must not be forked.
    if kind == "json":
        source = corpus_of(tmp_path)
    else:
        source = HubStream(Source("training.", "c4", write_hub(tmp_path / "hub", TEXTS)))
    out = tmp_path / "copies" / "out"
    manifest = write_tokens(source, "bytes", out, workers=workers)
    corpus = opened(out)
    assert len(corpus) == manifest.documents == len(TEXTS) and manifest.without_text == 1
    texts = [TOKENIZER.decode(corpus[index].content) for index in range(len(TEXTS))]
    assert texts == [text or "" for text in TEXTS]
    assert manifest.tokens == sum(len(text.encode()) for text in texts)
    assert damaged_files(out) == []
    assert sorted(contents(out)) == ["manifest.json", "offsets.bin", "tokens.bin"]
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    with pytest.raises(RunError, match="exists already"):
        write_tokens(source, "bytes", out)


def test_copy_is_on_disk_before_it_gets_its_name(tmp_path):
    with watched_disk() as disk:
        write_tokens(corpus_of(tmp_path), "bytes", tmp_path / "out")
    assert disk.renamed[-1] == "out" and disk.lost == []


def test_command_survives_sigkill(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["some words " * 100] * 10_000)
    data = ["--training.dataset", "json", "--training.dataset_path", path]
    command = [*TITAN_MOE, "tokenize", *data, "--workers", "1", "--out"]
    out, partial = tmp_path / "out", tmp_path / "out.partial" / "arrow"
    process = start_process([*command, out], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not partial.exists() and time.monotonic() < deadline:
        time.sleep(0.0005)
    process.kill()
    process.wait()
    assert partial.exists() and not out.exists()
    for folder in (out, tmp_path / "whole"):
        subprocess.run([*command, str(folder)], check=True, capture_output=True)
    assert contents(out) == contents(tmp_path / "whole")
    assert not partial.parent.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_a_command_with_workers(tmp_path, number):
    path = write_jsonl(tmp_path / "a.jsonl", ["some words " * 100] * 10_000)
    data = ["--training.dataset", "json", "--training.dataset_path", path, "--out", tmp_path / "a"]
    command = [*TITAN_MOE, "tokenize", *data, "--workers", "2"]
    process = start_process(command, stderr=subprocess.PIPE, start_new_session=True)
    pieces = tmp_path / "a.partial" / "arrow"
    assert until(lambda: any(pieces.glob("*.arrow")), TIMEOUT_S)  # A worker has finished one.
    os.killpg(process.pid, number)
    end = process.communicate(timeout=60)[1]
    assert process.returncode == 130, end
    assert b"0/8 [" not in end and b"\r" not in end
    assert b"\ninterrupted; the same command goes on where it stopped\n" in end
    if number == signal.SIGINT:  # Once is enough: 10 s.
        again = subprocess.run(command, capture_output=True)
        assert again.returncode == 0 and b"0/8 [" not in again.stderr


@pytest.mark.parametrize("held", [False, True])
def test_files_of_others_and_of_a_second_command_are_left_alone(tmp_path, held):
    partial = tmp_path / "out.partial"
    if held:
        lock_folder(partial, "--out")
    else:
        partial.mkdir()
    (partial / "thesis.txt").touch()
    words = "is in use by process" if held else "is in the way: move it"
    with pytest.raises(RunError, match=words):
        write_tokens(corpus_of(tmp_path), "bytes", tmp_path / "out")
    assert (partial / "thesis.txt").exists() and not (tmp_path / "out").exists()


def test_remains_of_another_source_are_not_used(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "write_whole", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_tokens(corpus_of(tmp_path, ["one", "two"]), "bytes", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    write_tokens(corpus_of(tmp_path, ["tre", "due"]), "bytes", tmp_path / "out")
    assert TOKENIZER.decode(opened(tmp_path / "out")[0].content) == "tre"


def test_check_finds_a_changed_byte_and_a_cut_file_is_refused(tmp_path):
    out = tmp_path / "out"
    write_tokens(corpus_of(tmp_path), "bytes", out)
    path = out / "tokens.bin"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    run = run_command("check", out)
    assert run.returncode == 1 and "wrong checksum of tokens.bin" in run.stdout
    path.write_bytes(content[:-2])
    with pytest.raises(ConfigError, match=r"tokens.bin has [\d,]+ bytes, not the [\d,]+ of"):
        opened(out)


def test_tokens_of_another_tokenizer_or_reading_are_refused(tmp_path):
    name = write_ranks(tmp_path / "a/tokenizer.model")
    section = Training(parse_special_tokens=True)
    out = tmp_path / "out"
    write_tokens(corpus_of(tmp_path, ["a<|eot_id|>"]), name, out, training=section)
    tokenizer = load_tokenizer(name, section)
    assert opened(out, tokenizer)[0].content.tolist() == [97, 256 + 9]
    with pytest.raises(ConfigError, match=r"made with training.parse_special_tokens=true: set it"):
        opened(out, load_tokenizer(name))
    line = refusal(opened, out, TOKENIZER)
    assert f"model.tokenizer_path={name!r}, this run has 'bytes'" in line
    assert tokenizer.fingerprint not in line
    write_ranks(tmp_path / "a/tokenizer.model", merges=(b"ab",))
    with pytest.raises(ConfigError, match="whose files have changed since"):
        opened(out, load_tokenizer(name, section))


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin"])
def test_file_cut_short_while_a_run_reads_is_refused(tmp_path, name):
    write_tokens(corpus_of(tmp_path, TEXTS[:-1]), "bytes", tmp_path / "out")
    corpus = opened(tmp_path / "out")
    path = tmp_path / "out" / name
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(RunError, match=f"{path} was cut short"):
        for index in range(len(corpus)):
            corpus[index]


@pytest.mark.parametrize("end", [9, 2, -(2**62)])
def test_offset_outside_the_file_is_refused(tmp_path, end):
    """The offsets are 0, 3, 3 and 8: the second document would end after the file, before it
    begins, or before the file."""
    write_tokens(corpus_of(tmp_path, ["one", "", "three"]), "bytes", tmp_path / "out")
    with (tmp_path / "out/offsets.bin").open("r+b") as file:
        file.seek(16)
        file.write(end.to_bytes(8, "little", signed=True))
    with pytest.raises(RunError, match=r"offsets.bin is damaged, document 1 is not in the file"):
        opened(tmp_path / "out")[1]


@pytest.mark.parametrize("content", ["", "[]", '{"format": "other"}', "{}", None])
def test_foreign_manifest_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    line = refusal(opened, tmp_path)
    assert re.search(r"manifest.json .*titan-moe tokenize --out", line) and "\n" not in line
