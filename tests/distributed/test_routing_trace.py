"""Routings recorded in one layout are followed in any other, token by token."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.support.paths import DEBUG_CONFIGS
from tests.support.tiers import tiered
from tests.support.trainings import train_curve
from titan_moe.debug.routing_trace import FLIPS_FILE, Record, RoutingTrace, RowName, Tokens
from titan_moe.distributed.dtensor import local_part
from titan_moe.metrics.jsonl import read_json_lines
from titan_moe.runtime.ranks import RankError
from titan_moe.trainer import Trainer
from titan_moe.verify.compare.records import Curve
from titan_moe.verify.compare.run_spec import RunSpec, parse_run_spec

ROWS, SEQ_LEN, LAST = 16, 64, "mtp.layers.0"
KEYS = {
    "training.steps": "2",
    "training.global_batch_size": str(ROWS),
    "training.local_batch_size": "8",
    # No trace may see an evaluation.
    "validation.enable": "true",
    "validation.freq": "1",
    "validation.steps": "1",
}
SPEC = RunSpec(config=DEBUG_CONFIGS / "gate_deepseek_v3.toml", overrides=tuple(KEYS.items()))


def run(
    folder: Path,
    layout: str,
    *,
    replay: Path | None = None,
    alter: Callable[[Trainer], None] | None = None,
    **keys: Any,
) -> Curve:
    """Trains, records to the folder's `record`, and maybe follows another record."""
    debug = {"routing_record": folder / "record", **keys}
    if replay is not None:
        debug["routing_replay"] = replay
    words = tuple((f"debug.{key}", str(value)) for key, value in debug.items())
    return train_curve(parse_run_spec(f"layout={layout}", SPEC), folder / "run", words, alter)


def own_choices(folder: Path) -> np.ndarray:
    """Slots that the run's own router would have chosen otherwise, by step and layer, [S, L]."""
    lines = read_json_lines(folder / "run" / FLIPS_FILE)
    return np.array([list(line["flips"].values()) for line in lines])


class Recorded(NamedTuple):
    record: Path
    curve: Curve


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("one")
    return Recorded(folder / "record", run(folder, "dp_shard=1"))


def table(path: Path, step: int, layer: str) -> dict[tuple[RowName, int], tuple]:
    """(row, position) -> its experts, in their order."""
    found = {}
    for part in Record(path).steps[step]:
        if part.has(layer):
            rows, positions = part.tokens
            experts_RPK = part.read(layer).tolist()
            for row, experts_PK in zip(rows, experts_RPK, strict=True):
                for position, experts in zip(positions.tolist(), experts_PK, strict=True):
                    assert (row, position) not in found, "recorded twice"
                    found[row, position] = tuple(experts)
    return found


CASES = tiered(
    [("dp_shard=1", 3), ("tp=2,ep=2", 0)],
    slow=[("cp=2,recompute=op", 0), ("pp=2,schedule=ZBVZeroBubble", 0)],
    full=[
        ("dp_shard=2,ep=2,recompute=full", 0),
        ("pp=2,tp=2,schedule=DualPipeV", 0),
        ("dp_replicate=2,cp=2,tp=2,ep=2,etp=2", 5),
    ],
)


@pytest.mark.parametrize(("layout", "order"), CASES)
def test_record_is_followed_in_any_layout(
    tmp_path: Path, one_process: Recorded, layout: str, order: int
) -> None:
    ours = run(tmp_path, layout, replay=one_process.record, permute_rows=order)
    theirs = one_process.curve
    np.testing.assert_allclose(ours.scalars["loss"], theirs.scalars["loss"], rtol=1e-12)
    assert all((ours.loads[layer] == loads).all() for layer, loads in theirs.loads.items())
    assert not own_choices(tmp_path).any()
    layers = Record(one_process.record).dims.layers
    assert layers[-1] == LAST
    for step in (1, 2):
        for layer in layers:
            expected = table(one_process.record, step, layer)
            assert len(expected) == ROWS * SEQ_LEN
            assert table(tmp_path / "record", step, layer) == expected


def shift_positions(trainer: Trainer) -> None:
    tokens = RoutingTrace._tokens

    def shifted(self: RoutingTrace, batches: Any) -> Tokens:
        rows, positions = tokens(self, batches)
        return Tokens(rows, np.roll(positions, 1))

    RoutingTrace._tokens = shifted  # type: ignore[method-assign]


def test_wrong_tokens_change_the_routing(tmp_path: Path, one_process: Recorded) -> None:
    ours = run(tmp_path, "dp_shard=1", replay=one_process.record, alter=shift_positions)
    assert (own_choices(tmp_path)[0] > 50).all()
    assert not np.allclose(
        ours.scalars["loss"], one_process.curve.scalars["loss"], rtol=1e-6, atol=0
    )


def disturb_routers(trainer: Trainer) -> None:
    generator = torch.Generator().manual_seed(7)
    for moe in trainer.sharded.moe_layers().values():
        weight = local_part(moe.router.gate.weight.data)
        weight += 1e-2 * torch.randn(weight.shape, generator=generator)


def test_replay_binds_a_disturbed_router(tmp_path: Path, one_process: Recorded) -> None:
    run(tmp_path, "dp_shard=2", replay=one_process.record, alter=disturb_routers)
    assert table(tmp_path / "record", 1, LAST) == table(one_process.record, 1, LAST)
    assert own_choices(tmp_path)[0].sum() > 0, "the router itself would have chosen otherwise"


def test_record_of_other_data_is_refused(tmp_path: Path, one_process: Recorded) -> None:
    with pytest.raises(RankError, match=r"step 1 of .* has no routing of layers.1 for the row"):
        run(tmp_path, "dp_shard=1", replay=one_process.record, seed=1)
