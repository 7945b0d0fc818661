"""Configurations found by name."""

from pathlib import Path

import pytest

from tests.support.paths import REPO
from tests.support.refusals import refusal
from titan_moe.config import named
from titan_moe.config.parse import load_job

MOE = REPO / "configs" / "qwen3" / "debugmodel_moe.toml"


@pytest.mark.parametrize(
    "text",
    [
        "qwen3/debugmodel_moe",
        "qwen3/debugmodel_moe.toml",
        "configs/qwen3/debugmodel_moe.toml",
        "debugmodel_moe",
    ],
)
def test_a_name_is_found_from_any_folder(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Path(named.find_config(text)).resolve() == MOE
    assert load_job(["--config", text]) == load_job(["--job.config_file", str(MOE)])


def test_a_file_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3").mkdir()
    (tmp_path / "qwen3" / "debugmodel_moe").write_text("[training]\nsteps = 7\n")
    assert load_job(["--config", "qwen3/debugmodel_moe"]).training.steps == 7


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("qwen3/debugmodel_mo", "did you mean qwen3/debugmodel or qwen3/debugmodel_moe or "),
        ("debugmodel", "did you mean deepseek_v3/debugmodel or deepseek_v32/debugmodel or "),
        ("nowhere.toml", "nor does titan_moe bring a configuration of this name along"),
    ],
)
def test_a_name_that_is_none_is_one_line(text: str, says: str) -> None:
    line = refusal(load_job, ["--config", text])
    assert says in line
    assert line.startswith(f"job.config_file = {text}: cannot be read: No such file")
