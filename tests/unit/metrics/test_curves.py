"""plot_curves draws a picture of whatever a run has logged."""

import pytest

from titan_moe.metrics.curves import plot_curves
from titan_moe.metrics.jsonl import JsonLines
from titan_moe.runtime.errors import RunError

FULL = {
    "loss": 2.0,
    "grad_norm": 0.5,
    "lr": 1e-3,
    "tokens_per_second": 4e4,
    "validation_loss": 2.1,
    "moe/layers.1/max_over_mean": 1.5,
    "moe/layers.12/max_over_mean": 1.25,
}


def plot(folder, lines):
    sink = JsonLines(folder / "metrics.jsonl", resume_step=0)
    for step, values in enumerate(lines, start=1):
        sink.write(step, values)
    sink.close()
    words = {"title": r"no $\formula$", "unit": "byte", "uniform_loss": 5.55}
    plot_curves(folder / "metrics.jsonl", folder / "curves.png", **words)
    return (folder / "curves.png").read_bytes()


@pytest.mark.parametrize(
    "lines",
    [[FULL] * 5, [FULL], [{"loss": 2.0}, {"loss": float("nan")}]],
    ids=["every key", "one step", "a dense model that diverged"],
)
@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")
def test_draws_a_png(tmp_path, lines):
    picture = plot(tmp_path, lines)
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000


def test_an_empty_file_is_one_line(tmp_path):
    with pytest.raises(RunError, match="no logged step"):
        plot(tmp_path, [])
