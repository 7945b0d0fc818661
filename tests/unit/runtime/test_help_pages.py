"""Errors name a page of docs/ that is there."""

import re

import pytest

from tests.support.config_checks import problems
from tests.support.markdown import anchors, fences
from tests.support.paths import REPO
from tests.support.refusals import refusals
from titan_moe.cli.main import COMMANDS, main
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Training, Validation
from titan_moe.config.parse import known_keys, load_job
from titan_moe.config.translate import KEYS
from titan_moe.data.build import check_data
from titan_moe.runtime.failure import print_errors
from titan_moe.runtime.help_pages import ROWS, all_pages, page_for

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
    ("--training.on_spike roll_back", _TROUBLE + "loss-spikes-or-diverges"),
    ("--training.on_nonfinite roll_back", _TROUBLE + "loss-spikes-or-diverges"),
    ("--validation.steps -2", "configuration.md#validation.steps"),
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


_OF_COMMANDS = ("cli/", "verify/", "simulate/", "profiling/", "debug/why/", "generate.py")
"""Whose mistakes a command prints, with its own page where no other says more."""
_TELL_ALL = {
    "--out 3 exists already: nothing is overwritten, choose another",
    "3 holds no logged step to draw",
    "3.3=3: choose from 3",
    "3: version 3 is not known",
    "LOG_RANK=3 must be rank numbers, such as 0 or 0,1",
}
_OF_OTHERS = {
    # Put together of lines that name a page.
    "3: 3",
    "3; 3 (3)",
    "after step 3 3",
    "rank 3: 3: 3",
    "step 3: 3",
    "step 3, batch 3 of the data with those that were left out: 3",
    "step 3: 3; 3",
    "validation after step 3: 3; 3",
    "validation: 3",
    # What is wrong with a document, in the line that counts them.
    "has no text",
    "holds 3, not text",
    "holds NUL characters, as UTF-16 or binary data does",
    "holds half of a surrogate pair",
    # After lines that do.
    "every rank's calls and stacks: titan-moe report hang 3",
    # With config.json in the name of what they are about.
    "3 cannot be read: 3",
    "3 holds no JSON object",
}


def test_every_refusal_names_a_page() -> None:
    """Or a line that needs none: give a new one a row in docs/troubleshooting.md, or a pattern of
    `titan_moe/runtime/help_pages.py`, if there is more to say than it says."""
    found = refusals(REPO / "titan_moe")
    without = {
        line
        for line, file in found.items()
        if page_for(line) is None and not file.startswith(_OF_COMMANDS)
    }
    known = _TELL_ALL | _OF_OTHERS
    assert sorted(without - known) == []
    assert sorted(known - without) == []
    assert len(found) > 300


def test_every_row_that_an_error_may_name_is_of_some_line() -> None:
    """A pattern that matches nothing is of a line that has been reworded."""
    text = (_DOCS / "troubleshooting.md").read_text()
    shown = [line for fence in fences(text) for line in fence.text.splitlines()]
    lines = [*refusals(REPO / "titan_moe"), *(line.removeprefix("error: ") for line in shown)]
    named = {page_for(line) for line in lines}
    of_lines = {f"{_TROUBLE}{row}" for row, _ in ROWS}
    assert of_lines - named == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_page_but_those_that_train(name: str) -> None:
    page = page_for("--layers 3 is wrong", name)
    assert (page is None) == (name in ("train", "check", "config init", "config schema"))


def test_a_mistake_in_a_command_names_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "--ranks", "x"]) == 2
    assert capsys.readouterr().err.endswith("(docs/layouts.md#memory)\n")


def test_every_key_has_a_page_with_its_anchor() -> None:
    named = {page_for(f"{key}=3 is no good: choose 4") for key in known_keys()} - all_pages()
    assert {str(each).partition("#")[0] for each in named} == {"configuration.md"}
    found = anchors((_DOCS / "configuration.md").read_text())
    assert {str(each).partition("#")[2] for each in named} <= found


def test_a_refused_key_of_torchtitan_names_the_page_that_lists_them() -> None:
    text = (_DOCS / "coming-from-torchtitan.md").read_text()
    for key, known in KEYS.items():
        if known.fate == "refused":
            page, _, anchor = str(page_for(f"{key} = 3 (a.toml): {known.note}")).partition("#")
            assert page == "coming-from-torchtitan.md" and anchor in anchors(text)


def test_an_unknown_key_names_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_job(["--training.stepz", "3"])
    print_errors(error.value.lines)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("did you mean training.steps? (docs/troubleshooting.md#unknown-key)")


def test_what_no_page_says_more_about_stays_as_it_is() -> None:
    assert page_for("no such thing") is None
