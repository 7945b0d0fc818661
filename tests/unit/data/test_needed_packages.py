"""A training imports no package that it does not use, and says which one it lacks."""

import sys
from pathlib import Path

import pytest

from tests.support.documents import write_jsonl
from tests.support.jobs import command, run_to_end
from tests.support.refusals import refusal
from titan_moe.data.corpus import FileCorpus, Source
from titan_moe.data.tokens import write_tokens
from titan_moe.prepare.job import prepare

_UNUSED = (
    "datasets huggingface_hub tokenizers tiktoken transformers zstandard tqdm matplotlib jinja2 "
    "markupsafe tensorboard torchao"
)
_RUN = """
import os, sys
sys.modules.update(dict.fromkeys(sys.argv.pop(1).split()))  # Imports of these raise.
from titan_moe.train import main
sys.exit(main(sys.argv[1:], os.environ))
"""


def test_training_on_token_ids_needs_few_packages(tmp_path: Path) -> None:
    texts = write_jsonl(tmp_path / "texts.jsonl", ["a document " * 20] * 4)
    tokens = tmp_path / "tokens"
    write_tokens(FileCorpus(Source("training.", "json", texts)), "bytes", tokens)
    _, *words = command(
        tmp_path, training__dataset="tokens", training__dataset_path=tokens, training__steps=1
    )
    run = run_to_end(sys.executable, "-c", _RUN, _UNUSED, *words, OMP_NUM_THREADS=1)
    assert run.returncode == 0, run.stderr


def test_float8_without_torchao_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    _, *words = command(tmp_path, model__converters="quantize.linear.float8")
    line = "model.converters=quantize.linear.float8 needs the package torchao: pip install torchao"
    assert refusal(prepare, [*words, "--quantize.linear.float8.emulate=true"], 1, {}) == line
