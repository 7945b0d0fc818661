"""Which tokens a tensor's rows are, with and without tensor parallelism."""

import torch

from titan_moe.verify.localize.capture.tokens import Microbatch

ROWS = torch.tensor([70, 71])
POSITIONS = torch.tensor([2, 3, 8, 9])


def keys(microbatch: Microbatch, *shape: int) -> list[list[int]]:
    laid = microbatch.lay(torch.zeros(*shape), cut=False, gradient=False)
    assert laid is not None
    return laid.keys.tolist()


def test_rows_and_positions_in_the_order_of_the_tensor():
    alone = Microbatch(ROWS, POSITIONS, 1, 0)
    expected = [[row, position] for row in (70, 71) for position in (2, 3, 8, 9)]
    assert keys(alone, 2, 4, 5) == keys(alone, 8, 5) == keys(alone, 2, 4, 3, 5) == expected


def test_own_tokens_of_a_tp_rank():
    second = Microbatch(ROWS, POSITIONS, 2, 1)
    expected = [[70, 8], [70, 9], [71, 8], [71, 9]]
    assert keys(second, 2, 2, 5) == keys(second, 4, 5) == expected


def test_gathered_tokens_stand_by_row_in_three_dims_and_by_rank_in_two():
    second = Microbatch(ROWS, POSITIONS, 2, 1)
    assert keys(second, 2, 4, 5) == [[r, p] for r in (70, 71) for p in (2, 3, 8, 9)]
    assert keys(second, 8, 5)[:4] == [[70, 2], [70, 3], [71, 2], [71, 3]]


def test_cut_features_are_parts_and_whole_ones_are_copies_or_sums():
    second = Microbatch(ROWS, POSITIONS, 2, 1)
    gathered = torch.ones(2, 4, 5)
    cut = second.lay(gathered, cut=True, gradient=False)
    copy = second.lay(gathered, cut=False, gradient=False)
    summed = second.lay(gathered, cut=False, gradient=True)
    own = second.lay(torch.ones(2, 2, 5), cut=True, gradient=True)
    assert cut is not None and copy is not None and summed is not None and own is not None
    assert (cut.part, copy.part, summed.part, own.part) == (5, 0, 1, 0)
    assert cut.kind.exact and copy.kind.exact and own.kind.exact and not summed.kind.exact


def test_what_has_no_tokens_is_left_out():
    assert Microbatch(ROWS, POSITIONS, 1, 0).lay(torch.zeros(3), cut=False, gradient=False) is None
    assert (
        Microbatch(ROWS, POSITIONS, 1, 0).lay(torch.zeros(3, 4), cut=False, gradient=False) is None
    )
