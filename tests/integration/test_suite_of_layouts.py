"""The suite of three layouts from one seed checkpoint runs, and overlays their curves."""

import json
from pathlib import Path

import pytest

from tests.support.commands import TITAN_MOE
from tests.support.jobs import run_to_end
from tests.support.paths import REPO


@pytest.mark.full
@pytest.mark.timeout(900)
def test_three_layouts_of_eight_ranks_start_from_one_seed_checkpoint(tmp_path: Path) -> None:
    text = (REPO / "configs" / "suites" / "seed_8.toml").read_text()
    short = tmp_path / "short.toml"
    text = text.replace("steps = 100", "steps = 2").replace("repeats = 12", "repeats = 0")
    short.write_text(text)
    words = ["verify", "suite", str(short), "--out", str(tmp_path / "out"), "--json"]
    done = run_to_end(*TITAN_MOE, *words, cwd=REPO, seconds=900)
    rows = json.loads(done.stdout)
    assert len(rows) == 3 and all(row["verdict"] != "failed" for row in rows), done.stdout
    assert (tmp_path / "out" / "summary.html").read_text().count('<svg class="chart"') == 2
