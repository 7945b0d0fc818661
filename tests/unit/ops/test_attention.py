"""What queries see, pair by pair; sinks in low precision."""

from itertools import product
from typing import NamedTuple

import pytest
import torch

from titan_moe.ops.attention import first_seen_in_rows, is_seen, sdpa


class LocalAttention(NamedTuple):
    kind: str
    size: int


SIZES = [1, 2, 5, 12, 13, 100]


@pytest.mark.parametrize("mask_documents", [True, False])
@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_rows_are_seen_pair_by_pair_as_the_rules_say(kind: str, mask_documents: bool) -> None:
    documents_BS = torch.tensor([[0] * 6 + [1] + [2] * 6, [0] * 13, [7] * 2 + [3] * 11])
    queries_S, keys_S = torch.tensor([2, 5, 6, 11, 12]), torch.tensor([0, 1, 4, 6, 9, 12])
    for size in SIZES:
        local = LocalAttention(kind, size)
        first_BS = first_seen_in_rows(documents_BS.int(), local, mask_documents=mask_documents)
        assert len(first_BS) == (3 if mask_documents else 1)
        seen = is_seen(queries_S, keys_S, first_BS[:, queries_S]).expand(3, -1, -1)
        for b, (i, query), (j, key) in product(
            range(3), enumerate(queries_S.tolist()), enumerate(keys_S.tolist())
        ):
            near = query - key < size if kind == "window" else query // size == key // size
            same = documents_BS[b, query] == documents_BS[b, key] or not mask_documents
            assert bool(seen[b, i, j]) == (key <= query and near and bool(same))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_cost_no_precision(dtype: torch.dtype) -> None:
    """Errors with them are about those without."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 64, 32), (2, 2, 64, 32), (2, 2, 64, 32), (4,)]
    exact = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    exact = [x.to(dtype).double() for x in exact]
    mask = torch.ones(64, 64, dtype=torch.bool).tril()

    def results(tensors: list[torch.Tensor], *, sinks: bool) -> list[torch.Tensor]:
        q, k, v, sinks_H = (x.detach().requires_grad_() for x in tensors)
        out = sdpa(q, k, v, mask, 0.3, sinks_H if sinks else None)
        return [out, *torch.autograd.grad(out.sum(), [q, k, v, *[sinks_H] * sinks])]

    errors = {}
    for sinks in (False, True):
        ours = results([x.to(dtype) for x in exact], sinks=sinks)
        pairs = zip(ours, results(exact, sinks=sinks), strict=True)
        errors[sinks] = [((a - b).norm() / b.norm()).item() for a, b in pairs]
    for error, without in zip(errors[True], errors[False], strict=False):
        assert error <= 1.5 * without
    assert errors[True][4] <= 2 * max(errors[True][:4])
