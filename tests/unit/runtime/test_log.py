"""A bar off a terminal has lines that say how far it is."""

import pytest

from titan_moe.runtime.log import progress


def test_first_progress_line_without_a_terminal_has_a_percentage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock: list[float] = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    with progress(total=4, unit="chunk", leave=False) as bar:
        for clock[0] in (6.0, 12.0):
            bar.update()
    assert capsys.readouterr().err.split("|")[0] == "50%"
