"""The kernels on CUDA, against the slow loops of the CPU tests."""

import pytest
import torch

from tests.support import interpret
from tests.support.grouped_mm_cases import SIZES, check_against_the_slow_loop
from tests.support.operations import without_waits
from tests.support.token_sums import BOUND, CASES, Draw, errors
from titan_moe.ops.cross_entropy import cross_entropy
from titan_moe.ops.linear_cross_entropy import linear_cross_entropy
from titan_moe.ops.move_rows import add_rows, add_rows_reference, copy_rows, copy_rows_reference
from titan_moe.ops.permute_indices import (
    copies_to_ranks,
    copy_to_ranks,
    permute_indices,
    reached_ranks,
    sort_by_expert,
)


@pytest.mark.parametrize("name", interpret.CASES)
def test_kernels_equal_the_slow_formulas(name):
    interpret.cases_of(name).check_kernels("cuda")


def test_permute_indices_is_one_launch_without_a_wait():
    counts_PE = torch.tensor([[3, 0, 5], [1, 2, 0]], device="cuda")
    assert len(kernels_of(lambda: permute_indices(counts_PE, 11, 16))) == 1
    with without_waits():
        permute_indices(counts_PE, 11, 16)


def kernels_of(piece) -> list[str]:
    """Returns the kernels that one run of `piece` launches, once it is compiled."""
    piece()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        piece()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return [event.name for event in profile.events() if event.device_type == on_device]


@pytest.mark.parametrize("name", CASES)
def test_sums_over_tokens_in_bfloat16_are_within_one_percent(name: str):
    assert max(errors(CASES[name](Draw("cuda")))) < BOUND


def test_rows_move_in_one_launch_without_a_wait_and_repeat_their_bits():
    num_tokens, top_k, dim = 4096, 8, 2048
    x_TD = torch.randn(num_tokens, dim, dtype=torch.bfloat16, device="cuda")
    slots = torch.randperm(num_tokens * top_k, device="cuda")
    source_R = torch.cat([slots // top_k, torch.full((100,), -1, device="cuda")])
    rows_TK = slots.argsort().view(num_tokens, top_k)
    y_RD = copy_rows(x_TD, source_R)
    assert torch.equal(y_RD, copy_rows_reference(x_TD, source_R))
    y_RD = torch.randn_like(y_RD)
    y_TD = add_rows(y_RD, rows_TK)
    torch.testing.assert_close(y_TD, add_rows_reference(y_RD, rows_TK))
    for piece in (
        lambda: copy_rows(x_TD, source_R),
        lambda: add_rows(y_RD, rows_TK),
    ):
        assert len(kernels_of(piece)) == 1
        with without_waits():
            first, again = piece(), piece()
        assert torch.equal(first, again)


def test_choices_are_sorted_and_copied_without_a_wait():
    experts_TK = torch.rand(16384, 128, device="cuda").topk(8).indices
    with without_waits():
        sort_by_expert(experts_TK, 128)
        copies_to_ranks(experts_TK, 16, 8)
        copy_to_ranks(reached_ranks(experts_TK, 16, 8), 8)


@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("shape", [(16, 24), (7, 24), (16, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_grouped_mm_equals_the_slow_loop(dtype, shape, case):
    check_against_the_slow_loop(dtype, shape, case, device="cuda")


def test_cross_entropy_is_one_launch_and_repeats_its_bits():
    logits_TV = torch.randn(512, 151_936, dtype=torch.bfloat16, device="cuda")
    labels_T = torch.randint(0, 151_936, (512,), device="cuda")
    # The losses' sum is torch's; the copy stands for the product that makes logits.
    names = kernels_of(lambda: cross_entropy(logits_TV.clone(), labels_T))
    assert sum("cross_entropy" in name for name in names) == 1
    (loss, grad_TV), (again, again_TV) = (
        cross_entropy(logits_TV.clone(), labels_T) for _ in range(2)
    )
    assert torch.equal(loss, again) and torch.equal(grad_TV, again_TV)


def test_the_weights_gradient_is_added_up_in_float32():
    x, weight = (torch.randn(n, 256, device="cuda").bfloat16() for n in (1024, 4096))
    labels = torch.randint(0, 4096, (1024,), device="cuda")
    found = []
    for inputs, chunk_size in (([x, weight], 64), ([x.double(), weight.double()], 0)):
        inputs = [each.detach().requires_grad_() for each in inputs]
        loss = linear_cross_entropy(*inputs, labels, chunk_size=chunk_size).loss
        found.append([loss, *torch.autograd.grad(loss, inputs)])
    for ours, exact in zip(*found, strict=True):
        assert (ours - exact).norm() <= 1e-2 * exact.norm()
