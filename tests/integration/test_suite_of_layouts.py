"""The suite of layouts from one seed checkpoint finds right layouts inside the band and planted
mistakes different, and overlays all curves."""

import json
from pathlib import Path

import pytest

from tests.support.commands import TITAN_MOE
from tests.support.jobs import run_to_end
from tests.support.paths import REPO


@pytest.mark.full
@pytest.mark.timeout(900)
def test_layouts_of_eight_ranks_are_inside_and_planted_mistakes_different(tmp_path: Path) -> None:
    text = (REPO / "configs" / "suites" / "seed_8.toml").read_text()
    short = tmp_path / "short.toml"
    text = text.replace("steps = 100", "steps = 4").replace("repeats = 12", "repeats = 6")
    short.write_text(text)
    words = ["verify", "suite", str(short), "--out", str(tmp_path / "out"), "--json"]
    done = run_to_end(*TITAN_MOE, *words, cwd=REPO, seconds=900)
    found = [row["verdict"] for row in json.loads(done.stdout)]
    assert found == 4 * ["inside the noise band"] + 2 * ["different"], done.stdout
    assert (tmp_path / "out" / "summary.html").read_text().count('<svg class="chart"') == 2
