"""Errors name a page of docs/ that is there."""

import pytest

from tests.support.config_checks import problems
from tests.support.markdown import anchors
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


@pytest.mark.parametrize(
    ("line", "page"),
    [
        (problems("--parallelism.tensor_parallel_degree 3", ranks=3)[0], "layouts.md"),
        (problems("--training.text_column x")[0], _TROUBLE + "no-text-column"),
        (problems("--checkpoint.load_only")[0], "checkpoints.md"),
        (
            problems("--checkpoint.enable --checkpoint.initial_load_in_hf")[0],
            "huggingface.md",
        ),
        (problems("--validation.steps -2")[0], "configuration.md"),
        (problems("--moe.z_loss_weight 0.1", moe=False)[0], "moe.md"),
        (
            check_data(Training(dataset="json", dataset_path="/none"), Validation(), "bytes")[0],
            "recipes/own-text.md",
        ),
        (
            check_data(Training(), Validation(), "/no/tokenizer")[0],
            _TROUBLE + "tokenizer-missing-or-too-large",
        ),
        (
            "rank 0: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            _TROUBLE + "out-of-memory-on-the-gpu",
        ),
        ("rank 1 was killed by SIGKILL (often: out of memory)", _TROUBLE + "a-rank-was-killed"),
        ("step 3: loss nan, gradient norm nan: layers.1", _TROUBLE + "loss-is-nan"),
        (
            "checkpoint out/step-1 is damaged: wrong checksum of a",
            _TROUBLE + "checkpoint-is-damaged-or-incomplete",
        ),
    ],
)
def test_an_error_names_the_page_that_helps(line: str, page: str) -> None:
    assert page_for(line) == page


def test_an_unknown_key_names_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_job(["--training.stepz", "3"])
    print_errors(error.value.lines)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("did you mean training.steps? (docs/troubleshooting.md#unknown-key)")


def test_what_no_page_says_more_about_stays_as_it_is() -> None:
    assert page_for("no room") is None
