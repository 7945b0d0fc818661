"""Words for dispatchers."""

from typing import get_args

import pytest
import torch

from titan_moe.config.job_config import Parallelism
from titan_moe.distributed.expert_parallel import DISPATCHERS
from titan_moe.moe.dispatch.exchange import ExchangeDispatcher
from titan_moe.verify.layouts.layouts import OPTIONS, layout_tables, parse


def test_every_word_of_the_configuration_has_a_dispatcher() -> None:
    words = get_args(Parallelism.model_fields["expert_parallel_comm_backend"].annotation)
    assert words and set(words) <= set(DISPATCHERS)


def test_a_layout_names_the_dispatcher_that_it_is_proven_with() -> None:
    named = {}
    for word in OPTIONS["dispatch"]:
        tables = layout_tables(parse(f"dp_shard=4,ep=4,dispatch={word}"))["parallelism"]
        named[word] = tables.get("expert_parallel_comm_backend")
    others = {"standard": None, "nodes": "deduplicated", "bounded": None}
    assert named == {word: word for word in named} | others


@pytest.mark.parametrize("method", ["plan", "traffic"])
def test_a_dispatcher_that_lacks_a_method_is_named(method: str) -> None:
    class Unfinished(ExchangeDispatcher):
        def __init__(self) -> None:
            pass

    counts = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match=f"Unfinished has no {method}"):
        getattr(Unfinished(), method)(counts[:, None], counts)
