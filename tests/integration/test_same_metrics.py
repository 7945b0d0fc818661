"""Whole runs in other layouts write the metrics of one process: losses, norms, loads."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from tests.support.paths import DEBUG_CONFIGS
from tests.support.tiers import tiered
from tests.support.trainings import train_curve
from titan_moe.verify.compare.records import RunRecord
from titan_moe.verify.compare.run_spec import RunSpec, parse_run_spec

KEYS = {
    "training.steps": "2",
    "training.global_batch_size": "16",
    "training.local_batch_size": "4",
    "validation.enable": "true",
    "validation.freq": "1",
    # Other shapes than in training.
    "validation.local_batch_size": "4",
    "validation.seq_len": "32",
    "validation.steps": "3",
}
SAME = ("loss", "grad_norm", "mtp", "validation_loss", "lr", "norm of ", "moe/", "layers.")
"""Beginnings of keys whose values no layout changes; speed and memory are of a layout."""
Train = Callable[[str, str], RunRecord]


@pytest.fixture(scope="module")
def curve_of(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Trains each family in each layout once."""

    @cache
    def curve(family: str, layout: str) -> RunRecord:
        config = DEBUG_CONFIGS / f"gate_{family}.toml"
        spec = RunSpec(config=config, overrides=tuple(KEYS.items()))
        own = parse_run_spec(layout and f"layout={layout}", spec)
        return train_curve(own, tmp_path_factory.mktemp("run"))

    return curve


def test_squares_of_parameter_norms_add_up_to_the_global_norm(curve_of: Train) -> None:
    scalars = curve_of("deepseek_v3", "").scalars
    squares = [np.square(v).sum(1) for key, v in scalars.items() if key.startswith("norm of ")]
    np.testing.assert_allclose(np.sqrt(sum(squares)), scalars["grad_norm"], rtol=1e-12)


@pytest.mark.parametrize(
    "family, layout",
    tiered(
        [("deepseek_v3", "dp_shard=2,ep=2")],
        slow=[
            ("deepseek_v3", "dp_replicate=2,tp=2,etp=2"),
            ("llama4", "pp=2,cp=2,ep=2"),
            ("mixtral", "dp_shard=2,tp=2,ep=4"),
        ],
        full=[
            ("deepseek_v3", "pp=2,tp=2,ep=2"),
            ("deepseek_v3", "pp=2,cp=2,dp_shard=2,ep=2,schedule=ZBVZeroBubble"),
            ("gpt_oss", "cp=2,tp=2,etp=2,cp_method=ring"),
            ("deepseek_v3", "pp=4,schedule=Interleaved1F1B"),
            ("qwen3", "tp=2,cp=2,etp=2,cp_method=ulysses"),
            ("qwen3", "dp_replicate=2,cp=2,cp_method=ring"),
            ("qwen3", "pp=2,schedule=DualPipeV"),
        ],
    ),
)
def test_metrics_are_those_of_one_process(curve_of: Train, family: str, layout: str) -> None:
    ours, theirs = curve_of(family, layout), curve_of(family, "")
    assert {"loss", "validation_loss", "norm of norm.weight"} <= theirs.scalars.keys()
    for found, expected in [(ours.scalars, theirs.scalars), (ours.loads, theirs.loads)]:
        keys = {key for key in expected if key.startswith(SAME)}
        assert keys == {key for key in found if key.startswith(SAME)}
        for key in keys:
            pair = found[key], expected[key]
            np.testing.assert_allclose(*pair, rtol=1e-9, atol=1e-12, err_msg=key)
