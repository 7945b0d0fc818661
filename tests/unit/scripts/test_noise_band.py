"""The runs that the noise band's evidence is made of."""

from pathlib import Path

import numpy as np

from scripts.bench import noise_band as script
from titan_moe.verify.compare.records import Curve

_STEPS = 5


def test_no_two_runs_share_the_order_of_their_rows() -> None:
    tasks = script.tasks(["bfloat16"], 16)
    orders = [task.training.job.debug.permute_rows for task in tasks]
    assert len(set(orders)) == len(orders) == 1 + 24 + 16 + len(script.MISTAKES)
    names = [task.name for task in tasks[:25]]
    assert names == ["baseline", *(f"control {number}" for number in range(1, 25))]
    unseen = [task.training.job.training for task in tasks if task.name.startswith("unseen")]
    assert len(unseen) == 16
    assert len({task.path(Path()) for task in tasks}) == len(tasks)


def test_runs_of_a_group_have_as_many_ranks() -> None:
    tasks = script.tasks(["float32"], 2)
    groups = script.groups(tasks)
    assert sorted(task.name for group in groups for task in group) == sorted(t.name for t in tasks)
    assert all(len({task.training.world_size for task in group}) == 1 for group in groups)
    assert all(len(group) <= script.GROUP for group in groups)


def test_curves_come_back_whole(tmp_path: Path) -> None:
    counts = np.arange(_STEPS * 8).reshape(_STEPS, 8).astype(float)
    losses = np.linspace(6, 1, _STEPS)
    scalars = {"loss": losses, "grad_norm": losses / 3, "norm of w[3]": losses / 7}
    curve = Curve("one", range(1, _STEPS + 1), scalars, {"layers.1": counts})
    script.save_curve(curve, tmp_path / "curves" / "one.npz")
    back = script.read_curve(tmp_path / "curves" / "one.npz", "one")
    assert list(back.steps) == list(curve.steps) and list(back.scalars) == list(scalars)
    assert script.bits(back) == script.bits(curve)
    assert (back.loads["layers.1"] == counts).all()
    assert [path.name for path in (tmp_path / "curves").iterdir()] == ["one.npz"]
