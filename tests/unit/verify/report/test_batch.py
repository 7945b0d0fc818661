"""The page of a step's sequences, and the command."""

import json
import re
from html import unescape

import numpy as np
import pytest

from tests.support.commands import run_command
from tests.support.documents import random_texts, write_jsonl
from tests.support.paths import DEBUG_CONFIGS
from tests.support.report_cases import Page
from titan_moe.config.job_config import JobConfig
from titan_moe.config.training_stages import training_stages
from titan_moe.data.build import build_reader
from titan_moe.data.loader import continue_state, merge_states
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.verify.report.batch import batch_page, read_sequences


def job_of(path, *, stages=(), **keys):
    own = {"dataset": "json", "dataset_path": str(path), "global_batch_size": 4, "seq_len": 64}
    return JobConfig(training={**own, "repeat_dataset": True, **keys}, stages=list(stages))


def page_of(job, step=1):
    tokenizer = load_tokenizer("bytes", job.training)
    return batch_page(job, tokenizer, step, read_sequences(job, tokenizer, step, 4))


TOKEN = re.compile(r'<(mark|span)(?: class="([^"]*)")? title="[^"]*">([^<]*)</')


def tokens(html, tag, kind=""):
    """The texts of a page's tokens in these tags, of this class."""
    found = TOKEN.findall(html)
    return [unescape(text) for each, kinds, text in found if each == tag and kind in kinds]


def test_what_the_assistant_wrote_is_marked_and_nothing_else(tmp_path):
    talk = [{"role": "user", "content": "Why <b>?"}, {"role": "assistant", "content": "n\né"}]
    (tmp_path / "a.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 64)
    html = page_of(job_of(tmp_path / "a.jsonl", dataset_format="messages", seq_len=100))
    page = Page(html)
    assert tokens(html, "mark") == [*("n", "↵\n", "é", "<|eos|>")] * 12
    assert tokens(html, "mark", "several") == ["é"] * 12
    assert tokens(html, "mark", "special") == ["<|eos|>"] * 12
    assert set(page.text) == {"", *(f"sequence-{number}" for number in range(4))}
    for section in [*page.text][1:]:
        assert "100 tokens, 15 targets (15 %), 3 documents, " in page.text[section]
        assert page.text[section].count("<|bos|>user↵\nWhy <b>?<|eos|>↵\n") == 3
    assert all(each.startswith("#") for each in page.loads)


def test_texts_end_with_the_label_that_comes_next_and_cut_characters_are_bytes(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["é" * 300] * 8)
    html = page_of(job_of(path, seq_len=64), step=2)
    assert tokens(html, "span") == ["\\xc3"] * 4  # The label at the end of step 1.
    assert tokens(html, "mark", "hex") == ["\\xa9", "\\xc3"] * 4
    assert tokens(html, "mark", "next") == ["\\xc3"] * 4
    assert tokens(html, "mark", "several") == ["é"] * 4 * 31


@pytest.mark.parametrize("ranks", [1, 2])
def test_sequences_are_those_of_a_run_on_any_number_of_ranks_in_any_stage(ranks, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", random_texts(90))
    job = job_of(path, stages=[{"from_step": 3, "global_batch_size": 6, "seq_len": 32}])
    tokenizer = load_tokenizer("bytes")
    readers, found = [], []
    for (_, staged), steps in zip(training_stages(job), (2, 2), strict=True):
        section = staged.training.model_copy(update={"local_batch_size": 1})
        place = {"seed": 0, "num_ranks": ranks}
        before = readers
        readers = [build_reader(section, tokenizer, rank=rank, **place) for rank in range(ranks)]
        for reader in readers if before else ():
            state = merge_states([each.state_dict() for each in before])
            reader.load_state_dict(continue_state(state, before[0].identity, reader.identity))
        for _ in range(steps):
            batches = [reader.read_step() for reader in readers]
            found.append([row for batch in batches for (row,) in batch])
    for without_stages, steps in ((True, (1, 2)), (False, (1, 2, 3, 4))):
        read = job.model_copy(update={"stages": []}) if without_stages else job
        for step in steps:
            ours = read_sequences(read, tokenizer, step, 3)
            for one, other in zip(ours, found[step - 1][:3], strict=True):
                assert one.samples == other.samples
                assert np.array_equal(one.labels_S, other.labels_S)
                assert np.array_equal(one.documents_S, other.documents_S)


def test_report_batch_writes_a_page_and_says_what_does_not_fit(tmp_path):
    page = tmp_path / "batch.html"
    words = ["report", "batch", "--config", DEBUG_CONFIGS / "sft.toml", "--sequences", 3]
    words += ["--out", page, "--training.seq_len", 128]
    done = run_command(*words, "--json")
    assert done.returncode == 0, done.stderr
    assert [each["tokens"] for each in json.loads(done.stdout)] == [128] * 3
    assert "Step 1: 3 of 16 sequences" in page.read_text()
    done = run_command(*words)
    assert done.returncode == 2 and "add --force" in done.stderr
    done = run_command(
        *words[:-2], "--force", "--ranks", 3, "--parallelism.tensor_parallel_degree", 2
    )
    assert done.returncode == 2 and "--ranks 3 does not fit" in done.stderr
