"""The norm of every parameter and expert is that of one process, and their squares add up."""

import numpy as np
import pytest

from tests.support.curves import train, training_of
from tests.support.paths import DEBUG_CONFIGS
from tests.support.tiers import split
from titan_moe.verify.compare.records import NORM_OF, Curve
from titan_moe.verify.compare.run_spec import RunSpec, parse_run_spec

SMALL = {"steps": "2", "global_batch_size": "8", "local_batch_size": "4", "seq_len": "32"}
SPEC = RunSpec(
    config=DEBUG_CONFIGS / "gate_deepseek_v3.toml",
    overrides=tuple((f"training.{key}", value) for key, value in SMALL.items()),
)


@pytest.fixture(scope="module")
def plain() -> Curve:
    return train(training_of(parse_run_spec("", SPEC)), parameter_norms=True)


def norms(curve: Curve) -> dict[str, np.ndarray]:
    return {key: curve.scalars[key] for key in curve.scalars if key.startswith(NORM_OF)}


def test_squares_add_up_to_the_global_norm(plain: Curve):
    total = np.sqrt(sum(np.square(values) for values in norms(plain).values()))
    np.testing.assert_allclose(total, plain.scalars["grad_norm"], rtol=1e-12)


LAYOUTS = ["dp_shard=2,ep=2", "dp_replicate=2,tp=2,etp=2", "pp=2"]


@pytest.mark.parametrize("layout", split(LAYOUTS, LAYOUTS[:1]))
def test_each_is_that_of_one_process(plain: Curve, layout: str):
    found, expected = (
        norms(train(training_of(parse_run_spec(f"layout={layout}", SPEC)), parameter_norms=True)),
        norms(plain),
    )
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-9, atol=1e-12, err_msg=name)
