"""Errors name a page of docs/ that is there."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.config_checks import problems
from tests.support.markdown import anchors, fences
from tests.support.paths import REPO
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Training, Validation
from titan_moe.config.parse import load_job
from titan_moe.data.build import check_data
from titan_moe.runtime.failure import print_errors
from titan_moe.runtime.help_pages import all_pages, page_for

_DOCS = REPO / "docs"


@pytest.mark.parametrize("named", sorted(all_pages()))
def test_every_page_is_there_with_its_anchor(named: str) -> None:
    name, _, anchor = named.partition("#")
    text = (_DOCS / name).read_text()
    assert not anchor or anchor in anchors(text)


_TROUBLE = "troubleshooting.md#"


_MISTAKES = [
    ("--parallelism.tensor_parallel_degree 3", "layouts.md"),
    ("--training.text_column x", _TROUBLE + "no-text-column"),
    ("--checkpoint.load_only", "checkpoints.md"),
    ("--checkpoint.enable --checkpoint.initial_load_in_hf", "huggingface.md"),
    ("--training.on_spike skip", _TROUBLE + "loss-spikes-or-diverges"),
    ("--training.on_nonfinite roll_back", _TROUBLE + "loss-spikes-or-diverges"),
    ("--validation.steps -2", "configuration.md"),
]


@pytest.mark.parametrize(("arguments", "page"), _MISTAKES)
def test_a_mistake_names_the_page_that_helps(arguments: str, page: str) -> None:
    line = problems(arguments, ranks=3)[0]
    assert page_for(line) == page


def test_missing_data_and_tokenizers_name_theirs() -> None:
    (line,) = check_data(Training(dataset="json", dataset_path="/none"), Validation(), "bytes")
    assert page_for(line) == "recipes/own-text.md"
    (line,) = check_data(Training(), Validation(), "/no/tokenizer")
    assert page_for(line) == _TROUBLE + "tokenizer-missing-or-too-large"


@pytest.mark.parametrize(
    ("line", "page"),
    [
        (
            "rank 0: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            _TROUBLE + "out-of-memory-on-the-gpu",
        ),
        ("rank 1 was killed by SIGKILL (often: out of memory)", _TROUBLE + "a-rank-was-killed"),
        ("step 3: loss nan, gradient norm nan: layers.1", _TROUBLE + "loss-is-nan"),
        ("step 9 is beyond the run in x, which came", _TROUBLE + "a-step-cannot-be-made-again"),
        ("the data is not what the run read: its", _TROUBLE + "a-step-cannot-be-made-again"),
        ("step 3: a spike: gradient norm 61", _TROUBLE + "loss-spikes-or-diverges"),
        (
            "checkpoint out/step-1 is damaged: wrong checksum of a",
            _TROUBLE + "checkpoint-is-damaged-or-incomplete",
        ),
    ],
)
def test_a_run_s_failure_names_the_page_that_helps(line: str, page: str) -> None:
    assert page_for(line) == page


def test_an_error_that_troubleshooting_shows_names_its_section() -> None:
    """Or a page that says more than troubleshooting does."""
    text = (_DOCS / "troubleshooting.md").read_text()
    lines, wrong, shown = text.splitlines(), [], 0
    for fence in fences(text):
        heading = next(line for line in lines[fence.line :: -1] if line.startswith("### "))
        (own,) = anchors(heading)
        errors = re.findall("^error: (.*)$", fence.text, re.MULTILINE)
        shown += len(errors)
        for number, line in enumerate(errors):
            page = page_for(line)
            other_row = page is not None and page.startswith(_TROUBLE) and page != _TROUBLE + own
            # A further line of one failure need not name the page again.
            if other_row or (page is None and number == 0):
                wrong.append((own, page, line))
    assert wrong == [] and shown > 50


_PACKAGES = ("runtime", "checkpoint", "routing", "debug/hang")
_TELL_ALL = {
    "3 exists: name another folder, or remove it",
    "3: version 3 is not known",
    "3 has no routing of 3 for the row 3 at position 3: it is of other data",
    # Put together of others.
    "3: 3",
    "after step 3 3",
}


def test_every_refusal_names_a_page() -> None:
    """Of the packages that keep a run from being lost; 3 stands for what a message is about."""
    found = {
        message: page_for(message)
        for package in _PACKAGES
        for path in sorted((REPO / "titan_moe" / package).glob("*.py"))
        for message in messages(ast.parse(path.read_text()))
    }
    assert {message for message, page in found.items() if page is None} == _TELL_ALL
    assert len(found) > 40


def messages(module: ast.Module) -> Iterator[str]:
    """Of the RunErrors and ConfigErrors that a module makes."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in _ERRORS:
            (argument,) = node.args
            lines = argument.elts if isinstance(argument, ast.List) else [argument]
            yield from filter(None, map(words, lines))


_ERRORS = ("RunError", "ConfigError")


def words(node: ast.expr) -> str:
    """Those of a literal; empty where a message is made elsewhere."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        parts = (each.value if isinstance(each, ast.Constant) else 3 for each in node.values)
        return "".join(map(str, parts))
    return words(node.left) if isinstance(node, ast.BinOp) else ""


def test_an_unknown_key_names_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_job(["--training.stepz", "3"])
    print_errors(error.value.lines)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("did you mean training.steps? (docs/troubleshooting.md#unknown-key)")


def test_what_no_page_says_more_about_stays_as_it_is() -> None:
    assert page_for("no such thing") is None
