"""Names of dispatchers in the configuration, and the choice between them."""

from typing import get_args

import pytest

from titan_moe.config.job_config import Parallelism
from titan_moe.distributed.expert_parallel import DISPATCHERS, choose_dispatcher
from titan_moe.distributed.parallel_dims import ParallelDims
from titan_moe.moe.config import MoEConfig


def test_every_word_of_the_configuration_has_a_dispatcher() -> None:
    words = get_args(Parallelism.model_fields["expert_parallel_comm_backend"].annotation)
    assert words and set(words) - {"auto"} <= set(DISPATCHERS)


@pytest.mark.parametrize(
    "ep, top_k, etp, on_node, name, reason",
    [
        (8, 8, 1, 8, "deduplicated", "5.25 of 8 ranks on average, 1.52 rows for one"),
        (16, 8, 1, 16, "deduplicated", "6.45 of 16 ranks on average, 1.24 rows for one"),
        (32, 8, 1, 32, "standard", "7.18 of 32 ranks on average, 1.11 rows for one"),
        (32, 8, 1, 8, "deduplicated", "3.60 of 4 nodes on average, 2.22 rows for one"),
        (16, 8, 2, 8, "deduplicated", "3.60 of 4 nodes on average, 2.22 rows for one"),
        (32, 1, 1, 8, "standard", "1.00 of 4 nodes on average, 1.00 rows for one"),
        (4, 8, 1, 4, "standard", "3.60 of 4 ranks on average, 2.22 rows for one"),
    ],
)
def test_rows_are_deduplicated_where_it_pays(
    ep: int, top_k: int, etp: int, on_node: int, name: str, reason: str
) -> None:
    dims = ParallelDims(64, ep=ep, etp=etp)
    chosen, said = choose_dispatcher(MoEConfig(128, top_k, 8), dims, on_node)
    assert chosen == name
    assert said == f"a token's {top_k} experts are on {reason}"
